"""Speed and size of deltas of a bfloat16 tensor, by the share of its elements that changed.

Encode and apply, with their digests, beside one memcpy of the tensor in the same rounds. Medians of the time of the
core, whoever else is busy.

    python benchmarks/delta.py                     256 MB
    python benchmarks/delta.py --megabytes 32
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch

from rl_refit.delta.codec import apply, encode, inspect, revert
from rl_refit.delta.forecast import CodecSpeed, DeltaForecast
from rl_refit.digest import digest_tensor

SHARES = (0.0, 0.001, 0.01, 0.03, 0.1)


def changed(base: torch.Tensor, share: float) -> torch.Tensor:
    """A copy of which `share` of the elements, at random places, differ in one bit."""
    new = base.clone()
    bits = new.view(torch.int16)
    for part in bits.split(2**22):
        part.bitwise_xor_((torch.rand(part.numel()) < share).to(torch.int16))
    return new


def seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(base: torch.Tensor, share: float, *, rounds: int) -> dict[str, float]:
    new, target = changed(base, share), torch.empty_like(base)
    digest = digest_tensor(base)
    delta = encode(base, new)
    spent: dict[str, list[float]] = {"memcpy": [], "encode": [], "apply": [], "revert": []}
    for _ in range(rounds):
        spent["memcpy"].append(seconds(lambda: target.copy_(new)))
        spent["encode"].append(seconds(lambda: encode(base, new, base_digest=digest)))
        spent["apply"].append(seconds(lambda: apply(base, delta)))
        if not torch.equal(base.view(torch.int16), new.view(torch.int16)):
            raise SystemExit("the delta did not lead to the new tensor")
        spent["revert"].append(seconds(lambda: revert(base, delta)))
    median = {path: statistics.median(each) for path, each in spent.items()}
    speed = CodecSpeed(
        changed_share=inspect(delta).changed / base.numel(),
        encode_bytes_per_s=base.nbytes / median["encode"],
        apply_bytes_per_s=base.nbytes / median["apply"],
        wire_share=delta.numel() / base.nbytes,
    )
    nbytes = base.nbytes
    forecast = DeltaForecast(total_bytes=nbytes, source_bytes=nbytes, sink_bytes=nbytes, speed=speed)
    return {
        "encode_gb_s": speed.encode_bytes_per_s / 1e9,
        "apply_gb_s": speed.apply_bytes_per_s / 1e9,
        "revert_gb_s": nbytes / median["revert"] / 1e9,
        "encode_over_memcpy": median["encode"] / median["memcpy"],
        "apply_over_memcpy": median["apply"] / median["memcpy"],
        "wire_share": speed.wire_share,
        "break_even_gbit_s": forecast.break_even_bytes_per_s * 8e-9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = torch.randn(int(arguments.megabytes * 1e6 / 2)).to(torch.bfloat16)
    rows = {share: measure(base, share, rounds=arguments.rounds) for share in SHARES}
    print(f"{base.nbytes / 1e6:.0f} MB bfloat16, one core, medians of {arguments.rounds} rounds")
    print(f"{'changed':>8s}{'encode':>12s}{'apply':>12s}{'on the wire':>13s}{'break-even':>15s}")
    for share, row in rows.items():
        print(
            f"{share:8.1%}{row['encode_gb_s']:7.2f} GB/s{row['apply_gb_s']:7.2f} GB/s{row['wire_share']:13.2%}"
            f"{row['break_even_gbit_s']:8.2f} Gbit/s"
        )
    figures = {
        "benchmark": "delta",
        "bytes": base.nbytes,
        "rounds": arguments.rounds,
        "by_changed_share": {
            f"{share}": {name: round(value, 4) for name, value in row.items()} for share, row in rows.items()
        },
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
