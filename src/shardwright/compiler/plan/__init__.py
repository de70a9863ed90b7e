"""The planner: the optimisation problem that it solves, and the files that read from top to bottom.

Variables (`search.problem.Problem`)
    s_n    the strategy of operator n: which mesh axes split which of its factors    `spaces.choices_of`
    l_p    the layout in which parameter p is stored                                 `spaces.with_parameters`
    h_v    the redistribution that several readers of value v share, if any          `search.problem.EdgeTables`
    e_v    the axes over which the gradient of v, a cast or view of a parameter, is summed before that `search.problem`
    r_b    whether block b is recomputed by the backward (activation checkpointing)  `search.recomputing`

Cost, in seconds of a step or bytes sent
    minimise  sum over n           operator(s_n)                computing, and collectives inside n
            + sum over v, readers  transfer(s_maker, s_reader)  all-gathers, reduce-scatters, ..., of both directions
            + sum over p           leaf(l_p)                    the update by the optimizer
            + sum over b           r_b * forward(b)             recomputation
    Each term is a method of `pricing.cost.Objective`: `Seconds` and `Bytes` are the two there are.
    Where the hardware hides communication behind computing, a step takes less than this sum (``timing/``). What is
    minimised then are sums that are bounds of that (`pricing.cost.Seconds`), on each mesh several (`hidden`); plans
    between two that were found are tried, too (`search.mixing`).

Constraints
    each rank holds at most the memory limit:
        sum over p  (shard + gradient + optimizer states)                            `search.weights.Weights._leaves`
      + sum over n  (1 - r_b) * tensors saved for the backward                       `search.weights.Weights`
      + largest buffer of a collective <= limit                                      `search.buffers`
    pinned operators have the strategies of their pins                               `spaces.pinned_strategies`
    inputs, buffers and outputs have given layouts                     `spaces.fixed_leaves`, `spaces.output_layouts`

Solution
    All terms are tables over a few variables, and their sum has its minimum by variable elimination (`search.exact`);
    where tables would be too large, bounds leave out values that no minimum has (`search.bounds`, `search.narrow`).
    The memory limit is priced: a byte costs so much, and the price that just makes the plan fit is looked for
    (`search.budget`), with branch and bound where a gap is left (`search.branching`). Every plan comes with a lower
    bound of all plans on the meshes that were searched (`meshes.Meshes`); cost and bound make the gap.

Files, in the order in which a request passes them: `request` and `searches` (what is asked), `make` (the entry),
`hidden`, `meshes` and `mesh_search` (how much is hidden, which meshes, and the search on each), `spaces` and
``search/`` (choices, and the minimum), ``pricing/`` (the cost of each piece on given hardware). The result is a
`plan.Plan`: its `decisions`, the seconds of a step under them (``timing/``), `device_memory`, the names of its axes
(`axis_names`), its tables (`text`) and its reasons (`explain`). `baselines` has the plans that are known by name.
"""
