"""Self-contained HTML: reports of runs, plans, searches, scores and corrections; pieces for notebooks."""
