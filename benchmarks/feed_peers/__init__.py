"""What `benchmarks/feed.py` is made of.

material.py    real text, a vocabulary, block stores, rows of tokens
children.py    a process a measurement, with a time-out
sections.py    the figures; crash.py kills real ranks and counts what they learned
contender.py   runs in the child, with one module of_NAME for each contender
"""
