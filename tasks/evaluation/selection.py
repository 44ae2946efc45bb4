"""Which held-out rows are asked, and proof that none of them was trained on."""

from collections.abc import Sequence

from tasks.environments.row import Demonstration, Row
from tasks.evaluation.metrics import ordered_bands
from tasks.gates.prompt_key import prompt_key


class HeldoutEmptyError(ValueError):
    """There is no held-out row to evaluate."""


class HeldoutOverlapError(ValueError):
    """A held-out problem is in the training data; its accuracy would prove nothing."""


def stratified(rows: Sequence[Row], limit: int) -> list[Row]:
    """The first rows of every band, bands in the proportion they have in `rows`, in file order.

    Places go one at a time to the band with the largest size / (2·places + 1) (Sainte-Laguë),
    after one for each band; so a larger limit only adds rows, and no band vanishes unless
    `limit` is below the number of bands.

    Raises:
        HeldoutEmptyError: no rows.
    """
    if not rows:
        raise HeldoutEmptyError(
            "the held-out set is empty; raise data.source.heldout_rows or give data.source.heldout"
        )
    sizes = dict.fromkeys(ordered_bands(row.band for row in rows), 0)
    for row in rows:
        sizes[row.band] += 1
    places = dict.fromkeys(sizes, 0)
    for _ in range(min(limit, len(rows))):
        open_bands = [band for band in sizes if places[band] < sizes[band]]
        chosen = max(open_bands, key=lambda b: (places[b] == 0, sizes[b] / (2 * places[b] + 1)))
        places[chosen] += 1
    picked = []
    for row in rows:
        if places[row.band]:
            places[row.band] -= 1
            picked.append(row)
    return picked


def refuse_overlap(
    heldout: Sequence[Row], train: Sequence[Row], demonstrations: Sequence[Demonstration]
) -> None:
    """Compare ids and normalised prompts of held-out rows with all that SFT and RL train on.

    Raises:
        HeldoutOverlapError: names the held-out row and where training has it.
    """
    ids = {row.id: "the id of a training row" for row in train}
    prompts = {prompt_key(row.prompt): f"training row {row.id!r}" for row in train}
    for shown in demonstrations:
        ids.setdefault(shown.row_id, f"the row of demonstration {shown.id!r}")
        for message in shown.messages:
            if message["role"] == "user":
                key = prompt_key(message["content"])
                prompts.setdefault(key, f"demonstration {shown.id!r}")
    clashes = []
    for row in heldout:
        if row.id in ids:
            clashes.append(f"{row.id!r} is {ids[row.id]}")
        elif (where := prompts.get(prompt_key(row.prompt))) is not None:
            clashes.append(f"{row.id!r} has the prompt of {where}")
    if clashes:
        raise HeldoutOverlapError(
            f"{len(clashes)} of {len(heldout)} held-out rows are trained on: "
            f"{'; '.join(clashes[:5])}; run data prep again, which takes leaks out of training"
        )
