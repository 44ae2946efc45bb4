"""Draws docs/img/losses.svg from the losses themselves (`make docs`)."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/img/losses.svg"
COLOURS = {"ppo_clip": "#1f5fa8", "cispo": "#c2571a", "icepop": "#2f8f4e", "tis": "#7a3f9d"}


def pushes(config, ratios, advantage: float):
    """−∂loss/∂log π_θ of one token at each π_θ/μ, from the real loss."""
    import torch

    from tasks.rl.losses import policy_loss
    from tasks.rl.types import TrainBatch

    learner = torch.as_tensor(ratios).log().reshape(-1, 1).requires_grad_()
    everything = torch.ones(learner.shape, dtype=torch.bool)
    batch = TrainBatch(
        token_ids_B_T=everything.long(),
        valid_B_T=everything,
        action_mask_B_T=everything,
        sampler_logprobs_B_T=torch.zeros_like(learner),
        advantages_B_T=torch.full_like(learner, advantage),
        temperature_B=torch.ones(len(learner)),
    )
    policy_loss(learner, batch, config, 1.0).loss.backward()
    return -learner.grad[:, 0].numpy()


def draw() -> None:
    """Write the picture; the same bytes for the same losses."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    import numpy as np

    from configs.schema.rl_losses import Cispo, IcePop, PpoClip, Tis

    plt.rcParams |= {"svg.hashsalt": "losses", "font.size": 9, "svg.fonttype": "none"}
    ratios = np.geomspace(0.1, 8, 1601)
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), sharex=True, sharey="row")
    for column, advantage in enumerate((1.0, -1.0)):
        for config in (PpoClip(), Cispo(), IcePop(), Tis()):
            push, log_ratio = pushes(config, ratios, advantage), np.log(ratios)
            climbed = np.concatenate(
                [[0.0], np.cumsum((push[1:] + push[:-1]) / 2 * np.diff(log_ratio))]
            )
            climbed -= np.interp(0.0, log_ratio, climbed)
            style = {"color": COLOURS[config.type], "label": config.type, "linewidth": 1.6}
            axes[0, column].plot(ratios, climbed, **style)
            axes[1, column].plot(ratios, push, **style)
        axes[0, column].set_title("A = +1" if advantage > 0 else "A = −1")
        axes[1, column].set_xlabel("ratio π_θ/μ")
    axes[0, 0].set_ylabel("surrogate, 0 at ratio 1")
    axes[1, 0].set_ylabel("push on log π_θ")
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        axis.set_xticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], ["⅛", "¼", "½", "1", "2", "4", "8"])
        axis.axvline(1, color="0.8", linewidth=0.8)
        axis.axhline(0, color="0.8", linewidth=0.8)
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> int:
    """Draw."""
    sys.path.insert(0, str(ROOT))
    draw()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
