"""The records of a run, and their analysis: stragglers and their causes.

`StepRecord` is one step of one rank, `Journal` keeps records in a file, `StragglerDetector`
compares the steps of all ranks, and `StepTotals` adds them up. The analysis needs neither torch nor
a socket: it treats a run in progress and the files of a finished run alike.
"""
