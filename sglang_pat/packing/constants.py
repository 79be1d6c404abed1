"""Numbers that decide what plans are like, each with its source. `python tests/headers.py` writes them into csrc/packing/constants.h."""

KV_TILE = 64
"""KV tokens of a tile of the CUDA kernels (`kTokens` in csrc/cuda/tiles.h)."""

# Which steps have wide tiles only.

LITTLE_PERCENT = 50
"""Requests share little if, each reading for itself, they read at most so much more than what they have together: up to there plans with wide tiles only took
0.76 to 1.02 of the time in verify steps with 8 KV heads (benchmarks/notes/which-tiles.md, "Wide tiles only")."""

RAGGED = 4
"""Lengths differ (the batch is ragged) if the shortest is shorter than the longest by more than 1/RAGGED of that. Those that were measured differed by a half or more
(the same notes)."""

# Packs.

MAX_SEGMENT = 32
"""How many prefixes one segment may span. The native scheduler keeps a bit for each in a word. Agents' prompts have fewer than ten levels,
and a segment that long costs more to read again than to merge."""

MAX_DEPTH = 1024
"""Batches with more levels of prefixes are packed by the paper's heuristic: the native scheduler needs four kilobytes per level."""

TAILS_SHARE = 4
"""A work item is not cut within its tails, so they have at most 1/TAILS_SHARE of what a worker reads. With twice that,
`1,2,64_1024,256,256` and 64 rows took 1.08 times as long as without tails (benchmarks/notes/verify-steps.md, "Tails in one work
item")."""

TAILS_ITEMS = 2
"""Work items have tails only where there would be so many for each worker: with fewer, some workers have one more than others, and it is long. By
the prices three requests behind 1,000 tokens would take 2.3 times as long (benchmarks/notes/verify-steps.md, "Tails in one work item")."""

LEVELS = (512, 256, 128, 64, 32, 14, 6, 2, 0)
"""How many levels of the tree are packed where a plan of all does not fit its memory: the most of these with which it
fits. Whatever the policy does with them, 14 levels should fit a buffer, which has 16 parts for each request
(`layout.capacity`), and 6 a GPU's workspace, which has 8 (`executors.PARTS_OF_A_REQUEST`): a request has a part in each
level and one of its tail, and cuts make more. 2 are for workspaces that large heads fill; with 0 nothing is packed."""

# Bins.

MAX_WAVES = 8
"""How many bins a worker may run in turn. With 8 KV heads on 132 SMs, one wave leaves four SMs idle and two waves none; eight leave at most
4 % idle for any GPU and model (`python benchmarks/policies.py --waves`)."""

BUSY_WORKERS = 0.7
"""The share of an H200's SMs that reads work items of 64 rows as fast as all of them do: with 0.7, 107 unshared verify steps of 8 to 64 rows took 1.003
times what the best number of bins takes (benchmarks/notes/bins.md, "Bins of single queries"). Where a token takes longer than
its bytes, more are needed."""

SLACK = 64
"""A bin may miss the average by 1/SLACK of it before a pack is cut; with 32 `python benchmarks/policies.py --random 200` missed the 5 % of
`prices.GRAIN` at times."""

PASSES = 6
"""How often bins are filled at most while the longest may become shorter by 1/SLACK. Over 348 plans with an H200's prices it becomes 3 % shorter than with
one filling, and up to 40 %; more fillings bring nothing (benchmarks/notes/bins.md, "The least capacity"). Where less is left than expected, the last bins may be
empty."""

TOO_LONG = 8
"""Packs are split (`PackConfig.rebalance_queries`) where the longest bin is longer than the mean by more than 1/TOO_LONG of it. Only a matter of time: of 1,500 batches
with an H200's prices none was split below that (benchmarks/notes/bins.md, "Work items of fewer queries")."""

SPLIT_GAIN = 16
"""By 1/SPLIT_GAIN of itself at least must the longest bin become shorter then, as KV is read more often. Where a sixth or less was expected, steps on an H200
with KV of 16 bits took 0.92 to 1.06 of the time (benchmarks/notes/bins.md, "Work items of fewer queries")."""

# For how long a plan is used.

UNEVEN = 32
"""Some bins have more growing tails than others. When this has made a bin longer than the average by 1/UNEVEN of it, and by a KV tile, a new
plan is due. On an H200, plans that were used for longer took 1.1 to 1.4 times as long as new plans (benchmarks/notes/planning.md, "Plans that grow stale")."""

TAIL_GROWTH = 2
"""A tail may grow to this multiple of the longest work item, even if the bins stay even: a batch that starts with few tokens is spread over
few workers."""

LEAST_STEPS = 8
"""A plan is good for at least so many steps: it takes tens of microseconds to make, a step takes milliseconds."""
