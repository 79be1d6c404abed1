"""`python -m sglang_pat.demo`: a real server, a few hundred requests, and what packing did with them."""
