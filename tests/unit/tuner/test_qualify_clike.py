"""Forgotten quotes, brackets and semicolons are found, and sound code is left alone."""

import pytest

from tokenmill.tuner.qualify_clike import faults_in

PROGRAM = """\
#include <stdio.h>
#define TWICE(x) \\
    ((x) * 2)

/* a comment with " and { in it */
enum colour { RED, GREEN, BLUE };

struct point {
    int x, y;
    const char *name;
};

static const int sizes[] = {
    1, 2,
    3
};

int
largest(const int *values, int count)
{
    int best = values[0];  // "best" so far
    for (int i = 1; i < count; i++)
        if (values[i] > best)
            best = values[i];
    return best;
}

int main(void) {
    struct point p = {.x = 1, .y = 2, .name = "a \\"quoted\\" name"};
    char sign = '\\'';
    int total = sizes[0]
        + sizes[1];
    do {
        total--;
    } while (total > 0);
    switch (p.x) {
    case 1:
        printf("one %c"
               " and more\\n", sign);
        break;
    default:
        return 1;
    }
    if (total)
        return 1;
    else
        total++;
    return largest(sizes, 3) > 2 ? 0 : TWICE(1);
}
"""
JAVA = """\
public class Counter {
    private final int[] values = new int[] {1, 2, 3};

    @Override
    public String toString() {
        return "Counter{" + values.length + '}';
    }

    static int factorial(int n) throws ArithmeticException {
        int result = 1;
        for (int i = 2; i <= n; i++) {
            result *= i;
        }
        return result;
    }
}
"""
CPP = """\
int main() {
    std::vector<int> values{1, 2, 3};
    std::sort(values.begin(), values.end(), [](int a, int b) {
        return a > b;
    });
    add(point{1, 2, 3}, std::vector<int>{ 4, 5 });
    return 0;
}
"""


@pytest.mark.parametrize("code", [PROGRAM, JAVA, CPP, "", "int a;"])
def test_sound_code_has_no_faults(code: str) -> None:
    assert faults_in(code) == ()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('int main() {\n  puts("hello);\n  return 0;\n}', ["line 2: a double quote is not closed"]),
        ("char a = 'x;\nint b;", ["line 1: a single quote is not closed"]),
        ("int f() {\n  int a = 1\n  return a;\n}", ["line 2: no semicolon after '1'"]),
        ("int f() { return 1 }", ["line 1: no semicolon after '1'"]),
        ("int f() {\n  g(a)\n}", ["line 2: no semicolon after ')'"]),
        ('void f() {\n  puts("a")\n  puts("b");\n}', ["line 2: no semicolon after ')'"]),
        ('void f() {\n  char *a = "x"\n  g(a);\n}', ['line 2: no semicolon after "x"']),
        ("void f() {\n  while (a) {\n    break\n  }\n}", ["line 3: no semicolon after 'break'"]),
        ("void f() {\n  g(a;\n}", ["line 2: '(' is not closed before '}'"]),
        ("int a[2 = {1, 2};", ["line 1: '[' is never closed"]),
        ("void f() {\n  if (a) {\n    b();\n", ["line 1: '{' is never closed", "line 2: '{' is never closed"]),
        ("void f() {}\n}", ["line 2: '}' closes nothing"]),
        ("int a; /* no end", ["line 1: a comment is not closed"]),
    ],
)
def test_what_is_missing_is_named(code: str, expected: list[str]) -> None:
    assert [str(fault) for fault in faults_in(code)] == expected


@pytest.mark.parametrize("code", [PROGRAM, JAVA, CPP])
def test_a_forgotten_semicolon_is_found_wherever_a_line_ends(code: str) -> None:
    lines = code.splitlines()
    tried = 0
    for at, line in enumerate(lines):
        if not line.rstrip().endswith(";") or line.startswith("}") or "while (total" in line or "[]" in line:
            continue  # after `}` of a type or a list, and after do while, nothing tells it from what may be
        broken = "\n".join([*lines[:at], line.rstrip()[:-1], *lines[at + 1 :]])
        if line.startswith(" ") and "})" not in line:
            assert [fault.line for fault in faults_in(broken)] == [at + 1], line
            tried += 1
    assert tried >= 3


@pytest.mark.parametrize("code", [PROGRAM, JAVA, CPP])
def test_every_forgotten_bracket_or_quote_is_found(code: str) -> None:
    lines = code.splitlines()
    for at, line in enumerate(lines):
        if line.startswith("#") or line.startswith("    ((x)") or "comment" in line or "//" in line:
            continue
        for place, sign in enumerate(line):
            if sign in '(){}[]"' and "\\" not in line and "'" not in line:
                broken = "\n".join([*lines[:at], line[:place] + line[place + 1 :], *lines[at + 1 :]])
                assert faults_in(broken), f"{line!r} without {sign!r} at {place}"


def test_javascript_needs_no_semicolons() -> None:
    code = 'const f = (a) => {\n  const b = a + 1\n  return `${b}\n and "more`\n}\n'
    assert faults_in(code, semicolons=False) == ()
    assert [str(fault) for fault in faults_in("f('a)\n", semicolons=False)] == ["line 1: a single quote is not closed"]
