"""What keeps a version from being released."""

import pytest
from tools.release import obstacles

GOOD = {
    "version": "1.2.0",
    "changed": "",
    "tags": "v1.0.0\nv1.1.0",
    "changelog": "# Changelog\n\n## 1.2.0 (2027-01-31)\n",
}


def test_nothing_is_in_the_way() -> None:
    assert not list(obstacles(**GOOD))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"changed": " M README.md"}, "not committed"),
        ({"tags": "v1.1.0\nv1.2.0"}, "v1.2.0 is there"),
        ({"changelog": "## 1.2.0 (unreleased)\n"}, "no section"),
        ({"changelog": "## 1x2.0 (2027-01-31)\n"}, "no section"),
    ],
)
def test_obstacles(wrong: dict[str, str], words: str) -> None:
    [obstacle] = obstacles(**(GOOD | wrong))
    assert words in obstacle
