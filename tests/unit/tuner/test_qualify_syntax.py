"""Code with a missing quote, bracket or semicolon does not parse; correct code does."""

import pytest

from tokenmill.tuner.qualify.judge import syntax_faults
from tokenmill.tuner.qualify.tasks import Language

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
METHOD = "public static int one(int n) {\n    return 1;\n}\n"
SCRIPT = 'const f = (a) => {\n  const b = a + 1\n  return `${b}\n and "more`\n}\n'


@pytest.mark.parametrize(
    ("code", "language"),
    [(PROGRAM, "C"), ("", "C"), ("int a;", "C"), (JAVA, "Java"), (METHOD, "Java"), (SCRIPT, "JavaScript")],
)
def test_sound_code_has_no_faults(code: str, language: Language) -> None:
    assert syntax_faults(code, language) == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('int main() {\n  puts("hello);\n  return 0;\n}', ["line 2: a double quote is not closed"]),
        ("char a = 'x;\nint b;", ["line 1: a single quote is not closed"]),
        ("int f() {\n  int a = 1\n  return a;\n}", ["line 2: a semicolon is missing"]),
        ("int f() { return 1 }", ["line 1: a semicolon is missing"]),
        ("int f() {\n  g(a)\n}", ["line 2: 'g(a)' does not parse"]),
        ("void f() {\n  while (a) {\n    break\n  }\n}", ["line 3: 'break' does not parse"]),
        ("void f() {\n  g(a;\n}", ["line 2: a bracket ')' is missing"]),
        ("int a[2 = {1, 2};", ["line 1: a bracket ']' is missing"]),
        ("void f() {\n  if (a) {\n    b();\n", ["line 1: 'void f() {' does not parse"]),
        ("void f() {}\n}", ["line 2: '}' does not parse"]),
        ("int a; /* no end", ["line 1: '/* no end' does not parse"]),
    ],
)
def test_a_fault_is_named_with_its_line(code: str, expected: list[str]) -> None:
    assert syntax_faults(code, "C") == expected


@pytest.mark.parametrize(("code", "language"), [(PROGRAM, "C"), (JAVA, "Java")])
def test_every_forgotten_bracket_quote_or_semicolon_is_found(code: str, language: Language) -> None:
    lines = code.splitlines()
    tried = 0
    for at, line in enumerate(lines):
        if "((x)" in line or "comment" in line or "//" in line or "\\" in line or "'" in line:
            continue  # macros are text, and comments may hold anything
        for place, sign in enumerate(line):
            if sign in '(){}[]";':
                broken = "\n".join([*lines[:at], line[:place] + line[place + 1 :], *lines[at + 1 :]])
                assert syntax_faults(broken, language), f"{line!r} without {sign!r} at {place}"
                tried += 1
    assert tried >= 25


def test_a_quote_that_is_not_closed_is_found_in_javascript() -> None:
    assert syntax_faults("f('a)\n", "JavaScript") == ["line 1: a single quote is not closed"]
