"""Place stages on devices by eq. 1 of DT-FM.

64 devices in eight regions, with the constants of case 5 of the public DT-FM code: eight pipelines
of eight stages. The example compares the placement with a lower bound, the paper's genetic
algorithm, ranks by region and random placements.
"""

from __future__ import annotations

import numpy as np

import planner as pl

network = pl.load_network("dtfm_case5_code")
problem = pl.AssignmentProblem(network, 8, 8, activation_bytes=471e6, gradient_bytes=0.65e9)
print(problem)

found = pl.solve_assignment(problem, pl.Effort(1), seed=0)
print("this planner:   ", found)
print("violations:", pl.check(found.plan, problem))
for stage, group in enumerate(found.plan.groups[:2]):
    print(f"stage {stage}: {', '.join(network.ids[d] for d in group)}")

genetic = pl.solve_assignment(problem, pl.MaxIterations(200), seed=0, method="genetic")
print("the paper's GA: ", genetic)

# consecutive ranks, numbered region by region: eight ranks per stage
order = np.arange(64).reshape(8, 8)
print(f"ranks by region: {problem.cost(order):.4f} s")
rng = np.random.default_rng(0)
drawn = [problem.cost(rng.permutation(64).reshape(8, 8)) for _ in range(20)]
print(f"random:          {np.mean(drawn):.4f} s (mean of 20)")
