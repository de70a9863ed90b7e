"""The programs `tools/eval.py` and `tools/predict.py`: evaluate text detection and recognition, and read images."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--config", required=True, metavar="FILE.yaml")
@click.option("-o", "--set", "overrides", multiple=True, metavar="KEY=VALUE")
def evaluate(config: str, overrides: tuple[str, ...]) -> None:
    """Evaluate the weights eval.ckpt_load_path on the images of eval.dataset; each rank takes its part."""
    from shardwright.ocr import reading

    print(reading.evaluate(config, overrides), flush=True)


@click.command()
@click.option("--det-config", metavar="FILE.yaml", help="Finds the texts; without it images are single words.")
@click.option("--det-weights", metavar="PATH", help="By default eval.ckpt_load_path of that file.")
@click.option("--rec-config", metavar="FILE.yaml", help="Reads the texts; without it they are found alone.")
@click.option("--rec-weights", metavar="PATH", help="By default eval.ckpt_load_path of that file.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="DIR")
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
def predict(
    det_config: str | None,
    det_weights: str | None,
    rec_config: str | None,
    rec_weights: str | None,
    out: Path,
    images: tuple[Path, ...],
) -> None:
    """Write each image with its texts drawn into DIR, and beside it their corners and words, a line each."""
    from shardwright.ocr.reading import Pages, network

    pages = Pages(network(det_config, det_weights, "det"), network(rec_config, rec_weights, "rec"))
    for image in images:
        for path in pages.write(image, out):
            print(path, flush=True)
