"""The table of a GPU that nobody measured, from the H200's and a data sheet:

python tests/derived_table.py > sglang_pat/packing/tables/a100.json
"""

from __future__ import annotations

import msgspec

from sglang_pat.cli.tile_prices import H200, PRICED
from sglang_pat.cli.tune import written
from sglang_pat.packing import FORMATS
from sglang_pat.packing.devices import GpuTable, Price
from sglang_pat.packing.spec import KVFormat

GPU, SMS, READ_TBPS, CLOCK_GHZ = "NVIDIA A100 SXM 80GB", 108, 1.88, 1.41
"""NVIDIA A100 Tensor Core GPU data sheet; of the nominal bandwidth 0.92, the fraction that the H200 reaches of its 4.8 TB/s."""

H200_CLOCK_GHZ = 1.98


def derived(known: GpuTable) -> GpuTable:
    """The start of an item takes the same number of cycles as by `known`, and so does a token, unless reading its bytes takes longer."""
    slower = H200_CLOCK_GHZ / CLOCK_GHZ

    def prices(form: KVFormat) -> tuple[Price, ...]:
        bytes_of_token = 2 * known.head_dim * form.bytes_with_scales(known.head_dim, known.head_dim)
        reading_ns = bytes_of_token / (READ_TBPS * 1e3 / SMS)
        return tuple(
            msgspec.structs.replace(
                price,
                item_ns=round(price.item_ns * slower, 1),
                token_ns=round(max(price.token_ns * slower, reading_ns), 2),
            )
            for price in known.prices_of(form.bits)
        )

    of_16bit, of_8bit, of_4bit, of_2bit = (prices(FORMATS[name]) for name in PRICED)
    return GpuTable(
        GPU, SMS, READ_TBPS, known.head_dim, of_16bit,
        f"derived from the table of {known.gpu} by tests/derived_table.py; not measured; KV of 8 bits is converted by other warps where there is no wgmma",
        known.bin_ns, known.wave_ns, of_8bit, of_4bit, of_2bit, turn_in_plans_ns=known.turn_in_plans_ns,
    )  # fmt: skip


if __name__ == "__main__":
    print(written(derived(H200)), end="")
