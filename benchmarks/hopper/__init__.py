"""``make hopper``: everything that needs a Hopper GPU, in parts of less than nine minutes. Importing it needs no GPU.

``__main__`` starts a process for each part, ``plan`` says what the parts are and what this machine lacks, ``worker`` measures
the pieces of one part, ``record`` keeps what they found and writes the pages, ``device`` times. Each part has its module.
"""
