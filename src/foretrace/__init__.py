"""foretrace: record one deep-learning run, replay it as a task graph, and ask what if.

    import foretrace as ft

    run = ft.read("run.json.gz")
    print(run.graph().apply(ft.techniques.PrefetchData()).simulate().step_time_s)

Names are loaded when they are first used, so that `import foretrace` costs next to nothing.
"""

from foretrace.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
