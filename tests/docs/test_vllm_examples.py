"""scripts/vllm_examples.py: what scripts written for vLLM import is found, refused by name or missing."""

from __future__ import annotations

import json

from scripts.vllm_examples import FOUND, MISSING, REFUSED, main

SCRIPTS = {
    "good.py": "from vllm import LLM, EngineArgs\nfrom vllm.utils.argparse_utils import FlexibleArgumentParser\n",
    "inner/function.py": "def main():\n    import vllm.lora.request as request\n    from vllm.v1 import engine\n",
    "refused.py": "from vllm.config import VllmConfig, PoolerConfig\nfrom vllm.assets.image import ImageAsset\n",
    "missing.py": "from vllm import LLM, Nothing\nimport vllm.nothing\n",
    "client.py": "import json\n",
}


def test_the_report_counts_scripts(tmp_path, capsys):
    for name, text in SCRIPTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert main([str(tmp_path), "--output", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["num_scripts"], report["counts"]) == (5, {FOUND: 2, REFUSED: 1, MISSING: 1})
    assert report["scripts"] == {
        "good.py": {"imports": FOUND},
        "inner/function.py": {"imports": FOUND},
        "refused.py": {"imports": REFUSED, "names": ["vllm.assets.image.ImageAsset", "vllm.config.VllmConfig"]},
        "missing.py": {"imports": MISSING, "names": ["vllm.Nothing", "vllm.nothing"]},
    }
    assert "5 scripts, of which 4 import vllm" in capsys.readouterr().out


def test_scripts_run_under_vllms_names(tmp_path):
    (tmp_path / "helper.py").write_text("WORD = 'helper'\n")
    (tmp_path / "good.py").write_text(
        "import vllm.config, helper, sys\nfrom vllm import EngineArgs\nfrom jaxengine import EngineConfig\n"
        "assert EngineConfig.from_options(model='a').model == 'm' and __name__ == '__main__' and len(sys.argv) == 1\n"
    )
    (tmp_path / "bad.py").write_text("from vllm import LLM\nraise SystemExit('no model')\n")
    main([str(tmp_path), "--run", "m", "--output", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: row["run"] for name, row in report["scripts"].items()} == {"good.py": "ran", "bad.py": "no model"}
