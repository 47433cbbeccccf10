"""The command line: one file a command group, heavy parts imported inside the commands.

    data.py   ingest, inspect       train.py   train       run.py   status, audit, picture       demo.py   demo

Exit codes: 0 done; 1 an error, told in one sentence; 2 wrong usage; 3 a check did not hold (`audit`,
`inspect --verify`); 128 + n ended at once by a second signal n. Only this layer prints.
"""
