from dataclasses import dataclass, field


@dataclass
class Settings:
    workdir: str
    steps: int = 3
    keep: list = field(default_factory=list)
