from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    root: Path

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, step: int) -> Path:
        return self.logs / f"step_{step}.txt"
