"""Write parameters and MACs into the READMEs and metafiles of configs/."""
import argparse
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Dict, List

from mmengine import Config

from mmlaplace.flops import OPS, count, default_shape

CONFIGS = Path(__file__).resolve().parent.parent / 'configs'
FOLDERS = ('classification', 'detection', 'ablations')
BEGIN = '<!-- written by tools/update_macs.py -->\n'
END = '<!-- end -->\n'
COLUMNS = ('layers', *OPS, 'total', 'without_inverse')
HEAD = ('config', 'input', 'parameters (M)', 'layers', *OPS, 'total',
        'without inverse')


@lru_cache(maxsize=None)
def _count(scope: str, model: str, shape: tuple) -> Dict[str, int]:
    return count(
        Config(dict(default_scope=scope, model=json.loads(model))), shape)


def measure(path: Path) -> dict:
    """Count a config at its own input size."""
    cfg = Config.fromfile(path)
    shape = default_shape(cfg)
    # Configs that differ in the schedule alone are counted once.
    model = json.dumps(cfg.model.to_dict(), sort_keys=True)
    return dict(
        _count(cfg.default_scope, model, shape), name=path.stem, shape=shape)


def table(rows: List[dict]) -> str:
    """Format the counts of configs, in G MACs, as Markdown."""
    lines = [HEAD, ['---'] + ['---:'] * (len(HEAD) - 1)]
    for row in rows:
        height, width = row['shape']
        lines.append([
            f'[{row["name"]}](./{row["name"]}.py)', f'{height} x {width}',
            f'{row["parameters"] / 1e6:.2f}'
        ] + [f'{row[column] / 1e9:.2f}' for column in COLUMNS])
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def write_metafile(text: str, rows: List[dict]) -> str:
    """Replace what follows each config's name in a metafile."""
    for row in rows:
        text = re.sub(
            rf'(/{re.escape(row["name"])}\.py\n(?:(?!Config:).)*?'
            r'Parameters: )\d+(\n *FLOPs: )\d+',
            rf'\g<1>{row["parameters"]}\g<2>{row["total"]}',
            text,
            flags=re.DOTALL)
    return text


def documents(folder: str) -> Dict[Path, str]:
    """Return the README and metafile of a folder as they should be."""
    rows = [measure(path) for path in (CONFIGS / folder).glob('*.py')]
    rows.sort(key=lambda row: (row['name'].partition('laplacianformer')[0],
                               row['shape'], row['total'], row['name']))
    readme = CONFIGS / folder / 'README.md'
    metafile = CONFIGS / folder / 'metafile.yml'
    before, _, rest = readme.read_text('utf-8').partition(BEGIN)
    after = rest.partition(END)[2]
    return {
        readme: before + BEGIN + table(rows) + END + after,
        metafile: write_metafile(metafile.read_text('utf-8'), rows)
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for folder in FOLDERS:
        for path, text in documents(folder).items():
            path.write_text(text, 'utf-8')


if __name__ == '__main__':
    main()
