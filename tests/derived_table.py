"""The table of a GPU that nobody measured, from one of the H200's and a data sheet:

python tests/derived_table.py a100.json > sglang_pat/packing/tables/a100.json
"""

from __future__ import annotations

import sys

import msgspec

from sglang_pat.cli.tile_prices import PRICED, spec_of
from sglang_pat.cli.tune import written
from sglang_pat.packing import FORMATS, devices
from sglang_pat.packing.devices import GpuTable, Price

DERIVED = {
    "a100.json": ("h200.json", "NVIDIA A100 SXM 80GB", 108, 1.88, 1.41, "; KV of 8 bits is converted by other warps where there is no wgmma"),
    "h100-192.json": ("h200-192.json", "NVIDIA H100 80GB HBM3", 132, 3.08, 1.98, ""),
    "h100-256.json": ("h200-256.json", "NVIDIA H100 80GB HBM3", 132, 3.08, 1.98, ""),
}  # fmt: skip
"""From which, name, SMs, TB/s of memory, clock in GHz, and what else is to be said, by file. NVIDIA A100 and H100 Tensor Core GPU data sheets; of the nominal bandwidth
0.92, the fraction that the H200 reaches of its 4.8 TB/s and that the H100 was measured with."""

H200_CLOCK_GHZ = 1.98


def derived(name: str) -> GpuTable:
    """A file's table: the start of an item takes the same number of cycles as on an H200, and so does a token, unless reading its bytes takes longer."""
    source, gpu, sms, read_tbps, clock_ghz, remark = DERIVED[name]
    known = devices.load(devices.TABLES / source)
    slower = H200_CLOCK_GHZ / clock_ghz

    def prices(kv: str) -> tuple[Price, ...]:
        form, spec = FORMATS[kv], spec_of(known.head_dim, kv)
        bytes_of_token = (spec.head_dim + spec.v_head_dim) * form.bytes_with_scales(spec.head_dim, spec.v_head_dim)
        reading_ns = bytes_of_token / (read_tbps * 1e3 / sms)
        return tuple(
            msgspec.structs.replace(
                price,
                item_ns=round(price.item_ns * slower, 1),
                token_ns=round(max(price.token_ns * slower, reading_ns), 2),
            )
            for price in known.prices_of(form)
        )

    of_16bit, of_8bit, of_4bit, of_2bit = map(prices, PRICED)
    return GpuTable(
        gpu, sms, read_tbps, known.head_dim, of_16bit, f"derived from the table of {known.gpu} by tests/derived_table.py; not measured{remark}",
        known.bin_ns, known.wave_ns, of_8bit, of_4bit, of_2bit, turn_in_plans_ns=known.turn_in_plans_ns,
    )  # fmt: skip


if __name__ == "__main__":
    print(written(derived(sys.argv[1])), end="")
