//! Chat templates from a grammar: common operations with odd arguments, loops that double a value,
//! chains and nesting of any depth.

use super::dice::Dice;

const NAMES: &str = "messages m m.role m.content m['content'] m.tool_calls messages[0] messages[0].content \
    messages[-1]['role'] messages[1:] messages[::-1] tools documents add_generation_prompt bos_token \
    eos_token loop.index loop.index0 loop.last loop.previtem loop ns ns.x x i self caller undefined_name \
    none true false varargs enable_thinking";
const COUNTS: &str =
    "0 1 2 3 10 60 1000 99999 100000 10000000 1000000000 9223372036854775807 -1 -5 1.5 1e308";
const FILTERS: &str = "length upper lower title capitalize trim string list tojson safe escape e first last min max sum \
    sort unique reverse items dictsort join int float abs bool lines pprint urlencode count default d \
    nosuchfilter indent round batch(3) slice(3)";
const TESTS: &str = "defined none string mapping iterable sequence number integer float boolean odd even undefined true \
    false startingwith('a') divisibleby(0) divisibleby(3) in([1]) eq(1) sameas(1) nosuchtest callable \
    safe";
const OPERATORS: &str = "+ - * / // % ** ~ and or == != < >= in";
const METHODS: &str = "split('') split() strip() lstrip('a') rstrip() upper() title() items() keys() values() get('role') \
    startswith('a') endswith('') count('') find('') join([1]) splitlines() isdigit() removeprefix('a') \
    removesuffix('') partition('a') format(1) append(1) replace('a','bb') replace('','xxxx') pop() nosuchmethod() islower()";

/// A random template.
pub fn template(d: &mut Dice) -> String {
    match d.below(12) {
        0 => doubling(d),
        1 => chain(d),
        2 => nested(d),
        3 => large(d),
        _ => {
            let body = block(d, 0);
            let end = if d.once_in(2) { "{{ m.content }}<|im_end|>\n" } else { "" };
            format!("{{% for m in messages %}}{body}{end}{{% endfor %}}{}", block(d, 1))
        }
    }
}

fn count(d: &mut Dice) -> &'static str {
    d.word(COUNTS)
}

/// A value that grows in a loop.
fn doubling(d: &mut Dice) -> String {
    let start = d.pick(&["'aaaaaaaa'", "[1]", "{'a': 1}", "1", "messages", "[]", "'é'"]);
    let step = d.pick(&[
        "ns.x ~ ns.x",
        "ns.x + ns.x",
        "[ns.x, ns.x]",
        "[ns.x]",
        "{'a': ns.x, 'b': ns.x}",
        "ns.x * 2",
        "ns.x|list + ns.x|list",
        "ns.x|string ~ ns.x|tojson",
        "dict(a=ns.x)",
        "ns.x|replace('a', 'aa')",
        "ns.x|indent(64)",
        "[ns.x]|list",
        "(ns.x, ns.x)",
        "ns.x|upper",
        "ns.x|batch(1)|list",
        "'%s%s'|format(ns.x, ns.x)",
        "ns.x|join(ns.x)",
        "ns.x ** 2",
        "namespace(y=ns.x)",
        "ns.x|map('string')|list",
        "ns.x.replace('', 'ab')",
        "ns.x|e",
        "ns.x|urlencode",
        "ns.x|tojson",
    ]);
    let end = d.pick(&[
        "{{ ns.x }}",
        "{{ ns.x|string }}",
        "{{ ns.x|length }}",
        "{{ ns.x == ns.x }}",
        "{{ ns.x|tojson }}",
        "{{ ns.x in ns.x }}",
        "{{ ns.x|sort }}",
        "{{ ns.x|pprint }}",
        "{{ ns.x|unique|list }}",
        "{{ {ns.x: 1} }}",
        "{{ ns.x < ns.x }}",
        "",
    ]);
    let n = d.pick(&["10", "25", "40", "60", "1000", "100000"]);
    let inner = if d.once_in(3) { end } else { "" };
    format!(
        "{{% set ns = namespace(x={start}) %}}{{% for i in range({n}) %}}{{% set ns.x = {step} %}}{inner}{{% endfor %}}{end}"
    )
}

/// A long chain of the same operation.
fn chain(d: &mut Dice) -> String {
    let n = *d.pick(&[20, 200, 2000, 20_000, 100_000]);
    let again = |start: &str, part: &str, end: &str| format!("{start}{}{end}", part.repeat(n));
    match d.below(13) {
        0 => again("{{ 1", "+1", " }}"),
        1 => again("{{ messages", ".a", " }}"),
        2 => again("{{ 'x'", "|upper", " }}"),
        3 => again("{{ ", "not ", "1 }}"),
        4 => again("{{ ", "-", "1 }}"),
        5 => again("{{ 1", " if 1 else 1", " }}"),
        6 => again("{{ messages", "[0]", " }}"),
        7 => again("{{ 'a'", "~'a'", " }}"),
        8 => again("{{ 1", " and 1", " }}"),
        9 => again("{{ 1", " is defined", " }}"),
        10 => again("{% if 1 %}a", "{% elif 1 %}b", "{% endif %}"),
        11 => again("", "{{ m }}{% set a = 1 %}", ""),
        _ => again("{{ 2", "**2", " }}"),
    }
}

/// Deep nesting of the same construct.
fn nested(d: &mut Dice) -> String {
    let n = *d.pick(&[20, 90, 149, 151, 200, 2000, 100_000]);
    let around =
        |open: &str, within: &str, close: &str| format!("{}{within}{}", open.repeat(n), close.repeat(n));
    match d.below(10) {
        0 => format!("{{{{ {} }}}}", around("(", "1", ")")),
        1 => format!("{{{{ {} }}}}", around("[", "1", "]")),
        2 => format!("{{{{ {} }}}}", around("{'a':", "1", "}")),
        3 => around("{% if 1 %}", "a", "{% endif %}"),
        4 => around("{% for i in [1] %}", "a", "{% endfor %}"),
        5 => around("{% filter upper %}", "a", "{% endfilter %}"),
        6 => around("{% for i in [1,2] %}", "a", "{% endfor %}"),
        7 => format!("{{{{ {} }}}}", around("f(", "1", ")")),
        8 => format!("{{% macro f(n) %}}{{{{ f(n+1) }}}}{{% endmacro %}}{{{{ f({}) }}}}", n),
        _ => around("{% set x %}", "a", "{% endset %}"),
    }
}

/// A large number as a size, or much work on a large value.
fn large(d: &mut Dice) -> String {
    let (n, k) = (count(d), count(d));
    match d.below(16) {
        0 => format!("{{{{ 'a' * {n} }}}}"),
        1 => format!("{{{{ range({n})|list|length }}}}"),
        2 => format!("{{{{ range(10)|slice({n}, 'x')|list }}}}"),
        3 => format!("{{{{ range(10)|batch({n}, 'x')|list }}}}"),
        4 => format!("{{{{ 'a\nb'|indent({n}) }}}}"),
        5 => format!("{{{{ '%{n}d'|format(1) }}}}"),
        6 => format!("{{{{ '%.{n}f'|format(1.5) }}}}"),
        7 => format!("{{% set a = 'a'*{n} %}}{{% for i in range({k}) %}}{{{{ a|length }}}}{{% endfor %}}"),
        8 => format!("{{{{ [1] * {n} }}}}"),
        9 => format!("{{{{ messages|tojson(indent={n}) }}}}"),
        10 => format!("{{{{ 1|round({n}) }}}}"),
        11 => format!("{{% for i in range({n}) %}}{{% for j in range({k}) %}}a{{% endfor %}}{{% endfor %}}"),
        12 => format!("{{{{ ('ab' * {n}).replace('a', 'b' * {k}) }}}}"),
        13 => format!("{{{{ 'x'.center({n}) }}}}{{{{ 'x'.zfill({k}) }}}}{{{{ 'x'.ljust({n}) }}}}"),
        14 => format!("{{{{ strftime_now('%{n}Y{}') }}}}", "%c".repeat(d.below(2000))),
        _ => format!("{{{{ range({n}, {k}, {})|sum }}}}{{{{ ({n})**({k}) }}}}", count(d)),
    }
}

fn block(d: &mut Dice, depth: usize) -> String {
    let n = 1 + d.below(3);
    (0..n).map(|_| statement(d, depth)).collect()
}

fn statement(d: &mut Dice, depth: usize) -> String {
    if depth > 3 {
        return format!("{{{{ {} }}}}", expression(d, 2));
    }
    let dash = *d.pick(&["", "", "-", "+"]);
    let e = expression(d, 1);
    match d.below(18) {
        0..5 => format!("{{{{{dash} {e} }}}}"),
        5 => format!(
            "{{%{dash} if {e} %}}{}{{% else %}}{}{{% endif {dash}%}}",
            block(d, depth + 1),
            block(d, depth + 1)
        ),
        6 => format!("{{% for x in {e} %}}{}{{% else %}}b{{% endfor %}}", block(d, depth + 1)),
        7 => format!(
            "{{% for i in range({}) %}}{}{{% endfor %}}",
            d.pick(&["3", "20", "1000", "100000"]),
            block(d, depth + 1)
        ),
        8 => format!("{{% set x = {e} %}}"),
        9 => format!("{{% set ns = namespace(x={e}) %}}{{% set ns.x = {} %}}", expression(d, 1)),
        10 => format!("{{% set x %}}{}{{% endset %}}", block(d, depth + 1)),
        11 => format!(
            "{{% macro f(a, b={e}) %}}{}{{% endmacro %}}{{{{ f({}) }}}}",
            block(d, depth + 1),
            expression(d, 1)
        ),
        12 => format!("{{% filter {} %}}{}{{% endfilter %}}", d.word(FILTERS), block(d, depth + 1)),
        13 => format!("{{% generation %}}{}{{% endgeneration %}}", block(d, depth + 1)),
        14 => format!("{{% for x in {e} recursive %}}{{{{ loop(x) }}}}{{% endfor %}}"),
        15 => d
            .pick(&[
                "{% break %}",
                "{% continue %}",
                "{% raw %}{{{% endraw %}",
                "{# c #}",
                "{% include 'x' %}",
                "{% extends 'default' %}",
                "{% include 'default' %}",
                "{% import 'default' as y %}",
                "{% do 1 %}",
                "{% endif %}",
                "{% autoescape true %}<{% endautoescape %}",
                "{% with x = 1 %}{% endwith %}",
                "\u{FDD0}",
                "{{ '\u{FDD0}' }}",
                "\0",
                "\x1b[31m",
                "{% block a %}{% endblock %}",
            ])
            .to_string(),
        16 => format!("{{{{ raise_exception({e}) }}}}"),
        _ => super::mutate::odd_text(d),
    }
}

fn expression(d: &mut Dice, depth: usize) -> String {
    if depth > 4 {
        return d.word(NAMES).to_string();
    }
    let next = |d: &mut Dice| expression(d, depth + 1);
    match d.below(20) {
        0..4 => d.word(NAMES).to_string(),
        4 => count(d).to_string(),
        5 => format!(
            "'{}'",
            d.pick(&["a", "", "é🦀", "<|im_end|>", "%s", "%d%d", "\\x1b[31m", "\\ud800", "\\n"])
        ),
        6 | 7 => format!("{}|{}", next(d), d.word(FILTERS)),
        8 => {
            let filter = d.word(FILTERS).split('(').next().unwrap_or_default();
            format!("{}|{filter}({}, {})", next(d), next(d), next(d))
        }
        9 => format!("{} is {}{}", next(d), d.pick(&["", "not "]), d.word(TESTS)),
        10..13 => format!("({} {} {})", next(d), d.word(OPERATORS), next(d)),
        13 => format!("({}).{}", next(d), d.word(METHODS)),
        14 => format!("{}[{}]", next(d), next(d)),
        15 => format!("({})[{}:{}:{}]", next(d), count(d), count(d), count(d)),
        16 => format!("[{}, {}]", next(d), next(d)),
        17 => format!("{{'a': {}, {}: 1}}", next(d), next(d)),
        18 => format!("({} if {} else {})", next(d), next(d), next(d)),
        _ => match d.below(7) {
            0 => format!("range({}, {})", next(d), count(d)),
            1 => format!("({})|map(attribute={})|list", next(d), next(d)),
            2 => format!("({})|selectattr('role', {})|list", next(d), next(d)),
            3 => format!("strftime_now({})", next(d)),
            4 => format!("dict(a={})", next(d)),
            5 => format!("namespace(x={})", next(d)),
            _ => format!("({})|groupby({})", next(d), next(d)),
        },
    }
}
