"""Benchmarks of aotc: ``python -m benchmarks`` lists the suites by topic.

Each topic is a folder, each module with a function ``run`` in it a suite. All suites share one timing function
(:mod:`benchmarks.timing`), one table printer (:mod:`benchmarks.report`) and one set of options
(:mod:`benchmarks.options`). ``programs`` holds the measured programs, ``peers`` the other engines, ``results`` the
records from which ``docs/make_results.py`` writes ``docs/results.md``.
"""
