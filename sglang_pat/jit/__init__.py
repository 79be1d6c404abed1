"""Builds native modules on first use, and caches them in a folder under a hash of their inputs.

The folder is tvm-ffi's (`TVM_FFI_CACHE_DIR`, else `~/.cache/tvm-ffi`). A library appears in it complete, under a name that depends on its
sources, flags and the version of tvm-ffi, and ends with a digest of the rest. It is replaced as a whole, never written into, because it may be in use. So
a folder that was filled ahead may be read-only, and environments and ranks can share it; users can share one that only root or a user named in OWNER can
write (`trust`).
"""

from sglang_pat.jit.library import PREFIX
from sglang_pat.jit.modules import (
    CSRC,
    NVCC_FLAGS,
    SANITIZE,
    find_cxx,
    find_nvcc,
    is_ready,
    is_ready_for_cuda,
    load,
    load_cuda,
)
from sglang_pat.jit.trust import CACHE, OWNER, BuildError, cache_folder, check_cache, find_cache, uid_of
