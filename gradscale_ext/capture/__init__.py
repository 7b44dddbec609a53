"""A whole learner step in one CUDA graph, and what a graph would get wrong.

- A call (step.py) reads its arguments (arguments.py), looks for a graph whose guards hold (guards.py), copies the
  arguments into the graph's memory, and replays it (graphs.py).
- What the state holds (state.py) is copied, compared and put back before and after a capture (snapshot.py, contents.py,
  generators.py).
- A record (record.py) has the calls of PyTorch that a step makes. An audit (audit.py) compares the one of the capture
  with the one of a plain step; `diagnose_capture` (diagnosis.py) compares two plain steps, and watches single calls
  (watch.py).
- What a replay would not repeat (checks.py, hooks.py) is a problem (problems.py), which `CapturedStep` raises, and
  `diagnose_capture` reports (report.py).
"""
