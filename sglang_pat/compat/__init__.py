"""SGLang as sglang-pat sees it: whatever differs between the supported releases, or is easy to get wrong, is answered here, once.

| module | about |
|---|---|
| `releases.py` | which SGLang is installed, and which ones are tested |
| `arguments.py` | `ServerArgs`: what the user asked for, and the steps that resolve it |
| `requests.py` | `Req`: its row, its tokens, its number in sglang-pat |
| `cache.py` | prefix caches: which ones sglang-pat follows, and a request's path in the tree |
| `batch.py` | `ForwardBatch`: extends, parts of them, CUDA graphs |
| `model.py` | `ModelRunner`: attention layers, their heads, this process's rank, and what all ranks agree on |
| `pool.py` | KV pools: sizes, formats, layouts, pools for sliding windows, writing K and V |
| `registry.py` | SGLang's HookRegistry: how its functions are hooked, and whether they are |
| `stock.py` | SGLang's own attention backends: which one prefills, what each gets wrong |

Another release should need changes here and in `radix_bridge/hooks.py` only; on CPUs also in `platform/`.
"""

from sglang_pat.compat import arguments, batch, cache, model, pool, registry, requests, stock
from sglang_pat.compat.releases import TESTED, release
