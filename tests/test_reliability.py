"""docs/reliability.md names a test for each fault, and there is one."""

import ast
import re

from tests.programs import ROOT


def marked():
    """{fault: names of its tests}: of @pytest.mark.survives(fault, ...)."""
    result = {}
    for path in sorted((ROOT / "tests").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                code = ast.unparse(decorator)
                if code.startswith("pytest.mark.survives("):
                    assert node.name.startswith("test_"), node.name
                    for fault in map(ast.literal_eval, decorator.args):
                        result.setdefault(fault, []).append(node.name)
    return result


def documented():
    """{fault: its row}: of the table's last column, `fault`, ... or none."""
    result = {}
    text = (ROOT / "docs/reliability.md").read_text()
    table = text.partition("\n| fault |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if not any(cells[1:]):  # A heading.
            continue
        assert re.fullmatch(r"none|`[a-z-]+`(, `[a-z-]+`)*", cells[-1]), row
        for fault in re.findall(r"`([a-z-]+)`", cells[-1]):
            result[fault] = row
    return result


def test_every_fault_of_the_table_has_a_test_and_every_test_a_row():
    tests, rows = marked(), documented()
    assert len(tests) > 40
    assert rows.keys() - tests.keys() == set(), "these have no test"
    assert tests.keys() - rows.keys() == set(), "these have no row"
