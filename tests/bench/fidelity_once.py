"""One parity or one quantisation as a whole process, to be timed against llama.cpp's own programs.

`fidelity_once.py parity F16 FILE IDS.npy` prints the mean KL over the second half of each chunk;
`fidelity_once.py quantise SOURCE OUT TYPE IMATRIX` writes a file.
"""

import sys
from pathlib import Path


def parity(f16: Path, gguf: Path, ids: Path) -> float:
    """Mean KL(F16‖file) in nats at the positions llama-perplexity scores."""
    import numpy as np

    from quantize.divergence import against
    from quantize.parity import summarise
    from quantize.rollouts import RolloutTokens

    chunks = np.load(ids)
    length = chunks.shape[1]
    scored = tuple(t > length // 2 for t in range(length))
    rollouts = [RolloutTokens(tuple(map(int, chunk)), scored) for chunk in chunks]
    return summarise(against(f16, {"file": gguf}, rollouts, 1)["file"]).kld.value


def main(arguments: list[str]) -> None:
    """Run what the arguments ask for."""
    what, *paths = arguments
    if what == "parity":
        print(f"{parity(*map(Path, paths)):.9f}")
        return
    from quantize.quantise import quantise

    source, out, quant_type, imatrix = paths
    quantise(Path(source), Path(out), quant_type, Path(imatrix))


if __name__ == "__main__":
    main(sys.argv[1:])
