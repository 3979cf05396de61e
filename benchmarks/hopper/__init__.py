"""``make hopper``: everything that needs a Hopper GPU, in parts of less than nine minutes. Importing it needs no GPU.

``plan`` says what there is, ``needs`` whether this machine can, ``__main__`` starts the parts, ``part`` runs the cells of one in
a process of its own, ``record`` keeps what a cell found, ``page`` writes it. Each part has a module with its cells.
"""
