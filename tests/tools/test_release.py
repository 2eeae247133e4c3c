"""What a release needs agrees: version, citation, changelog, workflow, and the table of supported versions."""

import re
import tomllib
from pathlib import Path
from runpy import run_path

import yaml

from lightning_mp import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_version_and_citation_agree():
    script = run_path(str(ROOT / "scripts" / "check_release.py"))
    named = script["versions"]()
    assert named["lightning_mp/_version.py"] == named["CITATION.cff"] == __version__
    assert named["CHANGELOG.md"] in (__version__, None)
    assert __version__ in (ROOT / "CHANGELOG.md").read_text()


def test_a_wrong_tag_is_told(capsys):
    script = run_path(str(ROOT / "scripts" / "check_release.py"))
    assert script["main"]("99.0.0") == 1
    assert f"lightning_mp/_version.py names {__version__}, but the release is 99.0.0." in capsys.readouterr().out


def test_links_of_the_readme_lead_to_the_files_of_the_tag():
    """The package index shows the README, where a relative link leads nowhere and the picture is missing."""
    readme = (ROOT / "README.md").read_text()
    absolute = run_path(str(ROOT / "scripts" / "absolute_links.py"))["absolute"]
    text = absolute(readme, "https://example.org/repository", "v1.2.3")
    assert re.findall(r"\]\((?!https://)", text) == []
    assert re.findall(r'(?:src|srcset)="(?!https://)', text) == []
    assert text.count('="https://example.org/repository/raw/v1.2.3/docs/pictures/') == 2
    linked = re.findall(r"https://example.org/repository/(?:raw|blob)/v1\.2\.3/([^)#\"]+)", text)
    assert len(linked) > 10
    assert [path for path in linked if not (ROOT / path).exists()] == []
    assert text.count("\n") == readme.count("\n")


def test_the_citation_is_complete():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]


def test_only_the_last_job_of_a_release_may_publish_and_no_secret_is_used():
    jobs = WORKFLOWS["release"]["jobs"]
    assert {name for name, job in jobs.items() if "permissions" in job} == {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "build"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_issue_templates_have_what_a_form_needs():
    forms = [file for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if file.stem != "config"]
    assert len(forms) >= 2
    for file in forms:
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= form.keys()
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids))


def test_the_table_of_supported_versions_is_that_of_the_project():
    """docs/limits.md against pyproject.toml, constraints.txt and the matrix of the CI workflow."""
    section = (ROOT / "docs" / "limits.md").read_text().split("## Support\n")[1].split("\n## ")[0]
    rows = {
        name.split(",")[0]: cells
        for name, *cells in re.findall(r"^\| (\w.*?) \| (.+?) \| (.+?) \| (.+?) \|$", section, re.M)
    }
    asked = {"Python": PROJECT["requires-python"]}
    for requirement in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["fp8"]]:
        name, versions = re.fullmatch(r"(\w+)(.*)", requirement).groups()
        asked[name] = versions
    pins = dict(re.findall(r"^(\w+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))
    matrix = WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]
    oldest = WORKFLOWS["ci"]["jobs"]["lightning"]["strategy"]["matrix"]["lightning"]
    tested = {
        **{name: [pins.get(name)] for name in asked},
        "lightning": [*oldest, pins["lightning"]],
        "Python": matrix["python-version"],
        "torch": matrix["torch"],
    }
    assert {name: cells[0] for name, cells in rows.items()} == asked
    assert {name: cells[1].split(", ") for name, cells in rows.items()} == tested
