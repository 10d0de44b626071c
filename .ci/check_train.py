"""Hold the result of `make train` to what it promises: python .ci/check_train.py RUN_DIRECTORY"""

import json
import sys
from pathlib import Path

MINIMUM = {"image_text": 0.93, "audio_text": 0.93, "motion_text": 0.95}


def main(directory: Path) -> None:
    """Exit with an error unless one process and four gave the same accuracies, high enough ones."""
    one, four = (json.loads((directory / f"processes_{n}" / "results.json").read_text()) for n in (1, 4))
    assert (one["ranks"], four["ranks"]) == (1, 4), (one["ranks"], four["ranks"])
    assert (one["strategy"], four["strategy"]) == ("single", "spindle"), (one["strategy"], four["strategy"])
    assert one["accuracy"].keys() == four["accuracy"].keys() == MINIMUM.keys(), four["accuracy"]
    for task, minimum in MINIMUM.items():
        alone, together = one["accuracy"][task], four["accuracy"][task]
        assert alone == together, f"{task}: accuracy {alone} with one process, {together} with four"
        assert together >= minimum, f"{task}: accuracy {together} is below {minimum}"
        losses = list(zip(one["loss"][task], four["loss"][task], strict=True))
        assert losses, f"{task}: no losses"
        # Computed in 64 bits; logged values pass through 32.
        assert all(abs(a - b) <= 1e-6 * max(1.0, abs(a)) for a, b in losses[:20]), f"{task}: {losses[:20]}"
    print("make train: one process and four agree:", four["accuracy"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
