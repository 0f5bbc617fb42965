"""Draw the pictures of `call_flow.md`, and photograph the page of `flax-ckpt show --html` with chromium.

`python -m tests.guide.pictures` writes them to ``migration_guide/pictures``; without chromium, only the drawings.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from html import escape
from pathlib import Path

import ml_dtypes
import numpy as np

from flax_ckpt_compat import save
from flax_ckpt_compat.cli import main

PICTURES = Path(__file__).parents[2] / "migration_guide" / "pictures"
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #24292f } .small { font-size: 12px; fill: #57606a }
  .name { font-weight: 600 } .box { fill: #f6f8fa; stroke: #8c959f } .paper { fill: #ffffff } .arrow { stroke: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9da7b3 } .box { fill: #161b22; stroke: #6e7681 } .paper { fill: #0d1117 }
    .arrow { stroke: #9da7b3 }
  }
"""
FLOWS = {
    "restore": [
        ("restore_checkpoint, restore", "read the settings once"),
        ("locate", "directory, step, prefix: which checkpoint"),
        ("open", "its format; types and shapes, no large array"),
        ("plan", "rules and target: where each leaf comes from"),
        ("check the policies", "missing, shape, kind: raise or warn"),
        ("read", "the arrays that are needed, with checksums"),
        ("place", "cast, shard, put on devices"),
        ("rebuild", "the containers of your target"),
    ],
    "save": [
        ("save_checkpoint, save", "read the settings and the flag once"),
        ("validate", "the step, and what may be replaced"),
        ("snapshot", "copy to host; async saves return after it"),
        ("write", "to a temporary name; sync to disk"),
        ("publish", "one atomic rename, or a store's commit"),
        ("retain", "remove what overwrite and keep evict"),
    ],
}


def drawing(title: str, steps: list[tuple[str, str]]) -> str:
    """Return boxes from top to bottom, narrow enough for a phone, as SVG."""
    height = 62 * len(steps) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 340 {height}" width="340" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="340" height="{height}" rx="8"/>',
    ]
    for i, (name, what) in enumerate(steps):
        y = 10 + 62 * i
        parts.append(f'<rect class="box" x="10" y="{y}" width="320" height="44" rx="6"/>')
        parts.append(f'<text class="name" x="22" y="{y + 19}">{escape(name)}</text>')
        parts.append(f'<text class="small" x="22" y="{y + 36}">{escape(what)}</text>')
        if i:
            parts.append(f'<path class="arrow" d="M170 {y - 18} v16 m-4 -5 l4 5 l4 -5" fill="none"/>')
    return "\n".join([*parts, "</svg>", ""])


def drawings() -> dict[str, str]:
    """Return every drawing by the name of its file."""
    return {f"{name}.svg": drawing(f"The steps of a {name}", steps) for name, steps in FLOWS.items()}


def photograph(chromium: str) -> None:
    """Write the picture of the HTML view of a small language model's checkpoint."""
    layers = {
        f"block_{i}": {
            "attention": {"qkv": np.zeros((192, 576), np.float32), "out": np.zeros((192, 192), np.float32)},
            "mlp": {"up": np.zeros((192, 768), ml_dtypes.bfloat16), "down": np.zeros((768, 192), ml_dtypes.bfloat16)},
            "norm": {"scale": np.zeros(192, np.float32), "bias": np.zeros(192, np.float32)},
        }
        for i in range(6)
    }
    tree = {"params": {"embedding": np.zeros((2000, 192), np.float32), **layers}, "step": 1000}
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder, "page.html"), PICTURES / "show-html.png"
        path = save(Path(folder, "runs"), tree, step=1000)
        main(["show", path, "--html", str(page)], standalone_mode=False)
        text = page.read_text(encoding="utf-8").replace(folder, "/home/me")
        page.write_text(text, encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=5000",
            "--window-size=1040,820",
        ]
        subprocess.run([chromium, *options, f"--screenshot={picture}", page.as_uri()], check=True, timeout=60)


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for file, text in drawings().items():
        (PICTURES / file).write_text(text, encoding="utf-8")
    if chromium := shutil.which("chromium") or shutil.which("google-chrome"):
        photograph(chromium)
