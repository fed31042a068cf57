"""How foretrace answers: one view per command, three faces (terminal, JSON, page), and a timeline export.

`views` holds plain structs, `build` makes them from timelines; `terminal`, `jsonout` and `html` render the
same structs, so a number or a sentence is the same wherever it is read.
"""
