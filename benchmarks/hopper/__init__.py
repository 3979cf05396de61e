"""``make hopper``: everything that needs a Hopper GPU, in parts of less than nine minutes. Importing it needs no GPU.

``plan`` lists the parts and what this machine lacks for them. ``__main__`` runs each part in processes of its own, ``record``
keeps the results and writes the pages, ``device`` times. Each part is a module with two functions: ``pieces`` and ``derive``.
"""
