"""Why does it not train, what fixes it, and the proof: subject -> findings -> trials -> page.

subject.py reads what there is (a config, logs, a loss curve); audits.py and curves.py find, each
finding with its evidence; trials.py runs the smallest changes that would remove a suspected cause;
page.py says it. Nothing here trains but through train.py.
"""
