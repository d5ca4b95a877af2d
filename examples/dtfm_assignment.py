"""Which device holds which stage: DT-FM's eq. 1, beside a bound, ranks by region and chance.

64 devices in eight regions, the constants of case 5 of the public DT-FM code, eight pipelines of
eight stages.
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

# ranks numbered region by region, a stage of eight after the other
order = np.arange(64).reshape(8, 8)
print(f"ranks by region: {problem.cost(order):.4f} s")
rng = np.random.default_rng(0)
drawn = [problem.cost(rng.permutation(64).reshape(8, 8)) for _ in range(20)]
print(f"random:          {np.mean(drawn):.4f} s in the mean of 20")
