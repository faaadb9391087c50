"""What the pages need beyond Markdown: the plots of benchmarks/results/, which lie outside docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Adds each plot under its path in the repository, so that the README's image links work in the pages, too."""
    root = Path(config.config_file_path).parent
    for plot in sorted((root / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, plot.relative_to(root).as_posix(), abs_src_path=str(plot)))
    return files
