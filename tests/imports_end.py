"""What a server of forks imports last: what is here stays, and no search for garbage in a fork copies its pages."""

import gc

gc.freeze()
gc.enable()
