"""Regret: what the planner's choice costs beside the best plan that it considered.

    python -m bench.regret --budget 20min

For a grid of collectives, sizes, meshes and rates, every plan that the planner considers, exactly
and with int8 between hosts, is carried out between real processes on hosts of `bench.cluster`,
checked and timed. Regret is the chosen plan's time over the best one's, less one. Beside it stands
how well the plans' times were predicted.
"""
