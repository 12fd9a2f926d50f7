//! Templates with unbounded time, memory or nesting, and a comparison of the guarded operators with the
//! engine's.

use super::{Template, Variables};
use minijinja::Value;
use std::ops::Range;

fn message(role: &str, content: &str) -> Value {
    Value::from_pairs([("role", role), ("content", content)])
}

fn render(source: &str) -> Result<String, String> {
    let template = Template::new("t.jinja", source, None).map_err(|e| e.to_string())?;
    let messages = [message("user", "Hello there"), message("assistant", "General")];
    let out: Result<(String, Vec<Range<usize>>), _> =
        template.render(&messages, &Value::from(()), false, &Variables::default());
    out.map(|o| o.0).map_err(|e| e.to_string())
}

/// Without bounds, these would take minutes, gigabytes, or overflow the stack.
#[test]
fn hostile_templates_end_with_an_error() {
    let long = |piece: &str, n: usize| piece.repeat(n);
    let big = "{% set a = 'a' * 10000000 %}";
    let ns = |body: &str| {
        format!(
            "{{% set ns = namespace(x=['a'], s='aaaaaaaa') %}}{{% for i in range(99999) %}}{body}{{% endfor %}}"
        )
    };
    let cases: Vec<String> = vec![
        // values that double
        "{% set ns = namespace(d=[]) %}{% for i in range(60) %}{% set ns.d = [ns.d, ns.d] %}{% endfor %}{{ ns.d|string }}".into(),
        ns("{% set ns.s = ns.s ~ ns.s %}"),
        ns("{% set ns.s = ns.s + ns.s %}"),
        ns("{% set ns.s = [ns.s, ns.s]|join %}"),
        ns("{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
        ns("{% set ns.x = ns.x + ns.x %}"),
        ns("{% set ns.x = ns.x * 2 %}"),
        ns("{% set ns.x = {'a': ns.x, 'b': ns.x} %}"),
        ns("{% set ns.x = (ns.x, ns.x) %}"),
        ns("{% set ns.x = ns.x|chain(ns.x) %}"),
        ns("{% set ns.x = [ns.x, ns.x]|tojson %}"),
        ns("{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
        ns("{% set ns.s = ns.s|replace('a', 'aaaa') %}"),
        ns("{% set ns.s = ns.s.replace('a', 'aaaa') %}"),
        ns("{% set ns.s = '%s%s'|format(ns.s, ns.s) %}"),
        ns("{% set ns.s = '{0}{0}'.format(ns.s) %}"),
        ns("{% set ns.s = ns.s.join(['a', 'b', ns.s]) %}"),
        long("{% set a = [a, a] %}", 100) + "{{ a }}",
        long("{% set a = [a, a] %}", 100) + "{{ a == [a] }}",
        long("{% set a = {'x': a, 'y': a} %}", 100) + "{{ {a: 1} }}",
        // deeply nested values
        ns("{% set ns.x = [ns.x] %}"),
        ns("{% set ns.x = {'a': ns.x} %}"),
        ns("{% set ns.x = namespace(p=ns.x) %}"),
        ns("{% set n = namespace() %}{% set n.p = ns.x %}{% set ns.x = n %}"),
        ns("{% set ns.x = ns %}{{ ns }}"),
        ns("{% set ns.x = [ns] %}{{ ns }}"),
        ns("{% set ns.x = loop %}"),
        ns("{% set ns.x = ns.x|items %}"),
        ns("{% set ns.x = [ns.x]|map('list')|list %}"),
        // single large allocations
        "{{ range(10)|slice(100000000, 'x')|list }}".into(),
        "{{ range(10)|batch(100000000, 'x')|list }}".into(),
        "{{ 'a\nb'|indent(1000000000) }}".into(),
        "{{ 'a\nb'|indent(width=1000000000) }}".into(),
        "{{ '%1000000000d'|format(1) }}".into(),
        "{{ '%.1000000000f'|format(1.5) }}".into(),
        "{{ '%*d'|format(1000000000, 1) }}".into(),
        "{{ '{:1000000000}'.format(1) }}".into(),
        "{{ '{:{}}'.format(1, 1000000000) }}".into(),
        "{{ 'a' * 100000000 * 2 }}".into(),
        "{{ ((1,) * 100000000)|length }}".into(),
        "{% set n = 100000000 %}{{ ((1,) * n)|length }}".into(),
        "{% set n = 100000000 %}{{ ([1] * n)|list }}".into(),
        format!("{big}{{{{ a|replace('a', a) }}}}"),
        format!("{big}{{{{ a|replace('', a) }}}}"),
        format!("{big}{{{{ a.replace('a', a) }}}}"),
        format!("{big}{{{{ a|list }}}}"),
        format!("{big}{{{{ a.split('') }}}}"),
        format!("{big}{{{{ a|split('a') }}}}"),
        format!("{big}{{{{ range(1000)|join(a) }}}}"),
        // text joined by itself, and other types in place of text
        ns("{% set ns.s = ns.s|join(ns.s) %}"),
        ns("{% set ns.s = ns.s|join([ns.s]) %}"),
        ns("{% set ns.s = ns.s|join(d=[ns.s]) %}"),
        ns("{% set ns.s = ns.s|replace('a', [ns.s, ns.s]) %}"),
        "{% set l = [1] * 100000 %}{{ l|replace('', l) }}".into(),
        "{% set l = [1] * 100000 %}{{ l|replace(1, l) }}".into(),
        "{% set l = [1] * 100000 %}{{ l|trim(l) }}".into(),
        "{% set l = ['\n'] * 100000 %}{{ (l|join)|indent(100000) }}".into(),
        format!("{big}{{{{ range(1000)|tojson(indent=a) }}}}"),
        format!("{big}{{{{ range(1000)|tojson(separators=[a, a]) }}}}"),
        format!("{big}{{{{ [[1,2],[3]]|sum(start=[]) }}}}{{% for i in range(999) %}}{{{{ a }}}}{{% endfor %}}"),
        // cheap instructions on large values
        format!("{big}{{% for i in range(99999) %}}{{{{ a|length }}}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{{{ a == a ~ 'b' }}}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% if 'b' in a %}}{{% endif %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set x = a[9999999] %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set x = a[5:7] %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set x = messages[0][a] %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set x = a.upper() %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set x = a is eq(a) %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set x = 1 if a < a ~ 'b' < a %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% for c in a %}}{{% break %}}{{% endfor %}}{{% endfor %}}"),
        format!("{big}{{% for i in range(99999) %}}{{% set x = range(1000)|map(attribute=a) %}}{{% endfor %}}"),
        // many instructions
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}".into(),
        "{% macro m(n) %}{% for i in range(99) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}".into(),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into(),
        "{% for i in [[1]] recursive %}{{ loop([i]) }}{% endfor %}".into(),
        format!("{{% for i in range(99999) %}}{}{{% endfor %}}", long("raw text, ", 40000)),
        // nested source
        format!("{{{{ 1{} }}}}", long("+1", 50_000)),
        format!("{{{{ 1{} }}}}", long("~1", 50_000)),
        format!("{{{{ x{} }}}}", long(".a", 50_000)),
        format!("{{{{ x{} }}}}", long("[0]", 50_000)),
        format!("{{{{ x{} }}}}", long("|upper", 50_000)),
        format!("{{{{ x{} }}}}", long(" is defined", 50_000)),
        format!("{{{{ {}x }}}}", long("not ", 50_000)),
        format!("{{{{ {}1 }}}}", long("-", 50_000)),
        format!("{{{{ {}1{} }}}}", long("[", 50_000), long("]", 50_000)),
        format!("{{{{ {}1{} }}}}", long("(", 50_000), long(")", 50_000)),
        format!("{{{{ {}1 }}}}", long("1 if 1 else ", 20_000)),
        format!("{}{}", long("{% if 1 %}", 20_000), long("{% endif %}", 20_000)),
        format!("{{% if 0 %}}{}{{% endif %}}", long("{% elif 0 %}", 20_000)),
        format!("{}x{}", long("{% if 1 %}{% else %}", 5_000), long("{% endif %}", 5_000)),
        long("{{ 'a' * 90000000 }}", 100),
        long("x", 1 << 20),
        // other templates
        "{% include 'template' %}".into(),
        "{% extends 'template' %}".into(),
        "{% import 'template' as t %}".into(),
    ];
    let mut wrong = Vec::new();
    for case in &cases {
        if let Ok(text) = render(case) {
            wrong.push(format!("{:.150} gives {} bytes", case, text.len()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Renders with the engine's own operators, without bounds.
fn unguarded(source: &str) -> Result<String, String> {
    super::bounds::begin(&[]);
    let mut env = minijinja::Environment::new();
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_filter("tojson", super::render::to_json);
    let messages = [message("user", "Hello there"), message("assistant", "General")];
    let context = Value::from_pairs([("messages", Value::from(messages.to_vec()))]);
    env.render_str(source, context).map_err(|e| e.to_string())
}

#[test]
fn guarded_templates_write_what_unguarded_ones_do() {
    let sources = [
        "{{ 1 + 2 }} {{ 1 + 2.5 }} {{ 'a' + 'b' }} {{ [1] + [2, 3] }} {{ (1,) + (2,) }}",
        "{% set a = 7 %}{{ a + 2 }} {{ a * 2 }} {{ a * 0.5 }} {{ a - 9 }} {{ a // 2 }} {{ a % 4 }} {{ a ** 2 }}",
        "{% set a = 'ab' %}{{ a * 3 }} {{ 3 * a }} {{ a ~ 1 ~ none }} {{ [a] * 2 }}",
        "{% set a = 'abcdef' %}{{ a[1:3] }} {{ a[::-1] }} {{ a[-2:] }} {{ a[:-2] }} {{ a[::2] }} {{ a[4:1:-2] }} {{ a[9:] }}|",
        "{% set a = [0, 1, 2, 3] %}{{ a[1:] }} {{ a[::-1] }} {{ a[-3:-1] }} {{ a[:0] }} {{ a[3:1:-1] }}",
        "{% set a = messages %}{{ a[0].role }} {{ a[-1]['content'] }} {{ a[1:]|length }} {{ a[0]['ro' ~ 'le'] }} {{ a[9] is defined }}",
        "{% set a = 3 %}{{ 1 < a < 5 }} {{ 1 < a > 5 }} {{ a == 3 }} {{ a != 3 }} {{ a >= 3 and a <= 3 }} {{ a in [1, 2, 3] }} {{ a not in [1] }}",
        "{% set s = 'General' %}{{ 'gen' in s }} {{ 'Gen' in s }} {{ s in messages[1].content }} {{ 'role' in messages[0] }} {{ s in [s] }}",
        "{% set ns = namespace(n=0, l=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.l = ns.l + [m.role] %}{% endfor %}{{ ns.n }} {{ ns.l|join(', ') }}",
        "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}{% for k, v in {'a': 1}|items %}{{ k }}{{ v }}{% endfor %}",
        "{% for m in messages|selectattr('role', 'equalto', 'user') %}{{ m.content }}{% endfor %} {{ messages|map(attribute='role')|join('/') }}",
        "{{ 'a b c'.split()|length }} {{ 'a,b'.split(',')[1] }} {{ ' x '.strip() }} {{ 'abc'.replace('b', 'd') }} {{ 'abc'.startswith('ab') }} {{ 'x'.upper() }}",
        "{% macro m(a, b=2) %}<{{ a }}{{ b }}>{% endmacro %}{{ m(1) }}{{ m(1, b=3) }}{% call m('x') %}{% endcall %}",
        "{% for i in range(3) recursive %}{{ loop.index }}{{ ',' if not loop.last }}{% else %}none{% endfor %}",
        "{% for i in [[1, [2]], [3]] recursive %}{% if i is iterable %}({{ loop(i) }}){% else %}{{ i }}{% endif %}{% endfor %}",
        "{% set x %}{% for i in range(4) if i is odd %}{{ i }}{% endfor %}{% endset %}{{ x|replace('1', 'one') }}",
        "{{ '%s has %03d'|format('a', 5) }} {{ '{} {x}'.format(1, x=2) }} {{ 'a\nb'|indent(2) }} {{ [3, 1, 2]|sort|join }}",
        "{{ {'b': 1, 'a': [1, 2]}|tojson }} {{ [1, 2]|sum }} {{ [1, 1, 2]|unique|list }} {{ {'a': 1}|dictsort }}",
        "{{ x is defined }} {{ x|default('d') }} {{ x }}| {{ {'a': 1}.get('b') }} {{ {'a': 1}.get('a') }} {{ (1, 2)[0] }} {{ [1,2]|first }}",
        "{% if messages[0]['role'] == 'user' and 'tools' not in messages[0] %}y{% endif %}{{ 'z' if messages|length == 2 else 'n' }}",
        "{% set a = none %}{{ a|default('d', true) }} {{ a ~ 'x' }} {{ not a }} {{ a is none }} {{ 5 is divisibleby(5) }}",
        "{% set a = true %}{{ a + 1 }} {{ a * 2 }} {{ 2 ** 70 + 1 }} {{ 1.0 + 1 }} {{ 3 * 1.5 }} {{ 1e20 + 1 }}",
        "{% set a = [1, [2, {'b': 'c\"'}]] %}{{ a }} {{ a|string }} {{ a ~ '' }} {{ a|tojson(indent=2) }} {{ a|length }}",
        "{% set a = 'äöü😀x' %}{{ a[1:4] }} {{ a[::-1] }} {{ a[0] }} {{ a|length }} {{ a|upper }} {{ a|list }} {{ a|last }}",
        "{% set t = messages|map(attribute='content')|list %}{{ t }} {{ t|first }} {{ t[-1] }} {{ t|join('|')|length }}",
        "{% filter upper %}a{{ messages[0].role }}b{% endfilter %}{% with x = 1, y = 2 %}{{ x + y }}{% endwith %}",
        "{% set x = {'a': {'b': [1, 2, 3]}} %}{{ x.a.b[1] }} {{ x['a']['b'][-1] }} {{ x.a.c is undefined }} {{ x.keys()|list }} {{ x.values()|list|length }}",
        "{% for a in [1, 2, 3, 4] %}{% if a == 2 %}{% continue %}{% endif %}{% if a == 4 %}{% break %}{% endif %}{{ a }}{{ loop.changed(a) }}{{ loop.cycle('x', 'y') }}{{ loop.previtem }}{% endfor %}",
        "{{ ['b', 'a', 'C']|sort }} {{ ['b', 'a']|reverse|list }} {{ [1, 2, 3, 4, 5]|batch(2)|list }} {{ range(5)|slice(2)|list }} {{ 'a b'|title }} {{ 'abc'|capitalize }}",
        "{{ messages|groupby('role')|length }} {{ messages|rejectattr('role', 'eq', 'user')|list|length }} {{ [1, none, 2]|select|list }} {{ [[1, 2], [3]]|map('length')|list }} {{ [1, 2]|zip([3, 4])|list }}",
        "{{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ [1] == [1] }} {{ {'a': 1} == {'a': 1} }} {{ 'a' == 1 }} {{ [1, 2] < [1, 3] }} {{ none == none }} {{ x == y }}",
        "{{ 5 // 0 }}",
        "{{ 'a' + 1 }}",
        "{{ none + 1 }}",
        "{{ 'a' * 'b' }}",
        "{{ [1] + (2,) }}",
        "{{ x.y.z }}",
        "{{ 1|nothing }}",
        "{{ 1 in 2 }}",
        "{{ 5[1:] }}",
        "{{ 'a'[::0] }}",
        "{{ 'a,b,c'.split(',', 1) }} {{ 'aXbX'.replace('X', '-', 1) }} {{ 'a\nb'.splitlines() }} {{ '-'.join(['a', 'b']) }} {{ 'abcabc'.count('b') }} {{ 'abc'.find('c') }} {{ 'x'.title() }} {{ '  x'.lstrip() }} {{ 'xx-'.rstrip('-') }}",
        "{% macro outer() %}{{ caller(1) }}{% endmacro %}{% call(n) outer() %}[{{ n }}]{% endcall %}{% set f = outer %}{{ f is defined }}",
        "{% block a %}in{{ 1 + 1 }}{% endblock %}{{ self.a() }}{% set ns = namespace({'q': 1}) %}{{ ns.q }}{% set ns.q = ns.q * 5 %}{{ ns.q }}",
    ];
    for source in sources {
        assert_eq!(
            render(source).is_ok(),
            unguarded(source).is_ok(),
            "{source}: {:?} {:?}",
            render(source),
            unguarded(source)
        );
        if let Ok(text) = unguarded(source) {
            assert_eq!(render(source), Ok(text), "{source}");
        }
    }
}

/// The engine's own slices panic on these.
#[test]
fn slices_backwards_are_those_of_python() {
    let source = "{% set a = [0, 1, 2, 3] %}{{ a[5:1:-1] }}{{ [][::-1] }}{{ a[1:3:-1] }}{{ a[:-9:-1] }}{{ a[-9:2] }}{{ ''[::-1] }}";
    assert_eq!(render(source).as_deref(), Ok("[3, 2][][][3, 2, 1, 0][0, 1]"));
}

/// A template that exceeds the budget a few times is not rendered again.
#[test]
fn a_template_that_does_not_end_is_given_up() {
    let source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
    let template = Template::new("t.jinja", source, None).ok();
    let told: Vec<String> = (0..1000)
        .filter_map(|_| template.as_ref()?.render(&[], &Value::from(()), false, &Variables::default()).err())
        .map(|e| e.to_string())
        .collect();
    assert_eq!(told.len(), 1000);
    assert!(told.iter().all(|t| *t == told[0]), "{told:?}");
}
