"""Whether a version that is installed has a known fault, by the advisories of the Python package index."""

import importlib.util
import json
import subprocess
import sys

import pytest


@pytest.mark.soak
@pytest.mark.skipif(not importlib.util.find_spec("pip_audit"), reason="pip install pip-audit")
def test_no_installed_package_has_a_known_fault():
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner=off", "--skip-editable", "--format=json"]
    audit = subprocess.run(command, capture_output=True, text=True, timeout=600)
    packages = json.loads(audit.stdout)["dependencies"] if audit.stdout.startswith("{") else []
    asked = [one for one in packages if "vulns" in one]
    if not asked:
        pytest.skip(f"this index has no advisories: {(audit.stderr or str(packages))[:200]}")
    assert {one["name"]: [fault["id"] for fault in one["vulns"]] for one in asked if one["vulns"]} == {}
