import dataclasses
from pathlib import Path


@dataclasses.dataclass
class Run:
    root: Path
    name: str = "run"

    @property
    def directory(self) -> Path:
        return self.root / self.name

    def checkpoint(self, step: int) -> Path:
        return self.directory / f"checkpoint_{step}"

    def log_file(self) -> Path:
        return self.directory / "log.txt"
