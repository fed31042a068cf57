"""What a server of forks imports first: no search for garbage among modules, which all stay; a fifth of the time."""

import gc

gc.disable()
