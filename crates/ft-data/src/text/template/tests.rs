//! Templates with unbounded time, memory or nesting, and a comparison with Jinja2 itself.

use super::{Template, Variables};
use minijinja::Value;
use rayon::prelude::*;
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

/// Attributes, filters, tests, functions and words of the syntax are none, nor what each rendering sets.
#[test]
fn names_of_variables_are_found() {
    for (source, names) in [
        ("{% for message in messages %}{{ message.content | trim }}{{ x }}{% endfor %}", "message x"),
        ("{% set thinking = thinking | default(true) %}{{ thinking }}", "thinking"),
        (
            "{% if a is not defined and b is string %}{% elif d %}{% endif %}{{ range(w)[v:][u] }}",
            "a b d u v w",
        ),
        ("{% generation %}{{ c }}{% endgeneration %}{{ documents }}", "c documents"),
        ("{{ tools }}{{ add_generation_prompt }}{{ raise_exception(e) if not f else none }}", "e f"),
    ] {
        let template = Template::new("t.jinja", source, None).unwrap_or_else(|e| panic!("{source}: {e}"));
        let read: Vec<&str> = template.names().iter().map(String::as_str).collect();
        assert_eq!(read.join(" "), names, "{source}");
    }
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
        // errors of syntax
        "{{ 'a }}".into(),
        "{{ messages ".into(),
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
        ns("{% set ns.x = ns.x|items|list %}"),
        ns("{% set ns.x = [ns.x]|map('default') %}"),
        ns("{% set ns.x = [ns.x].copy %}"),
        ns("{% set ns.x = [cycler(ns.x)] %}"),
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
        // arguments from lists and maps
        format!("{big}{{% for i in range(99999) %}}{{{{ dict(*[a]) }}}}{{{{ dict(*a) is defined }}}}{{% endfor %}}"),
        "{% set l = [1] * 100000 %}{% for i in range(99999) %}{% set x = cycler(*l).next() %}{% endfor %}".into(),
        ns("{% set ns.x = dict(a=ns.x, **{'b': ns.x}) %}"),
        "{% macro m() %}{{ m(*[], **{}) }}{% endmacro %}{{ m() }}".into(),
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
    let gives = |case: &String| Some(format!("{case:.150} gives {} bytes", render(case).ok()?.len()));
    let wrong: Vec<String> = cases.par_iter().filter_map(gives).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_template_has_at_most_a_thousand_branches() {
    let branches =
        |n: usize| render(&format!("{{% if 0 %}}{}{{% else %}}x{{% endif %}}", "{% elif 0 %}".repeat(n - 1)));
    assert_eq!(branches(1000).as_deref(), Ok("x"));
    assert!(branches(1001).is_err_and(|e| e.contains("more than 1000 branches")));
}

#[test]
fn slices_backwards_are_those_of_python() {
    let source = "{% set a = [0, 1, 2, 3] %}{{ a[5:1:-1] }}{{ [][::-1] }}{{ a[1:3:-1] }}{{ a[:-9:-1] }}{{ a[-9:2] }}{{ ''[::-1] }}";
    assert_eq!(render(source).as_deref(), Ok("[3, 2][][][3, 2, 1, 0][0, 1]"));
}

/// The texts are Jinja2's.
#[test]
fn captured_bodies_have_variables_of_their_own() {
    for (source, text) in [
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{% set x = 1 %}{% filter upper %}{% set x = 2 %}a{{ x }}{% endfilter %}{{ x }}", "A21"),
        ("{% set x = 1 %}{% set y %}{% set x = 2 %}{{ x }}{% endset %}{{ x }}{{ y }}", "12"),
        ("{% set x = 1 %}{% set x %}{% set x = 2 %}{{ x }}b{% endset %}{{ x }}", "2b"),
        ("{% set ns = namespace(x=1) %}{% filter upper %}{% set ns.x = 2 %}{% endfilter %}{{ ns.x }}", "2"),
        ("{% set ns = namespace() %}{% set ns.y %}{% set x = 3 %}q{% endset %}{{ ns.y }}{{ x }}", "q"),
        (
            "{% macro m() %}{{ x }}{% endmacro %}{% set x = 1 %}{% filter upper %}{% set x = 2 %}{{ m() }}\
             {% endfilter %}{{ m() }}",
            "11",
        ),
        (
            "{% filter upper %}{% macro m() %}a{% endmacro %}{{ m() }}{% endfilter %}{{ m is defined }}",
            "AFalse",
        ),
        (
            "{% for i in [[1, [2]], 3] recursive %}{% filter upper %}{% if i is iterable %}{{ loop(i) }}\
             {% else %}{% set q = i %}{{ q }}q{% endif %}{% endfilter %}{% endfor %}{{ q is defined }}",
            "1Q2Q3QFalse",
        ),
    ] {
        assert_eq!(render(source).as_deref(), Ok(text), "{source}");
    }
}

/// What the body has written is lost, as in Jinja2.
#[test]
fn loops_are_left_and_continued_out_of_bodies() {
    let body = |start: &str, word: &str, end: &str| {
        render(&format!(
            "{{% for i in [1, 2, 3] %}}{{{{ i }}}}{start}a{{% if i == 2 %}}{{% {word} %}}{{% endif %}}b{end}c\
             {{% endfor %}}d"
        ))
    };
    let filter = ("{% filter upper %}", "{% endfilter %}");
    assert_eq!(body(filter.0, "break", filter.1).as_deref(), Ok("1ABc2d"));
    assert_eq!(body(filter.0, "continue", filter.1).as_deref(), Ok("1ABc23ABcd"));
    assert_eq!(body("{% set y %}", "continue", "{% endset %}{{ y }}").as_deref(), Ok("1abc23abcd"));
    assert_eq!(body("{% with z = i %}", "break", "{% endwith %}").as_deref(), Ok("1abc2ad"));
    let both = ("{% with z = i %}{% filter upper %}", "{% endfilter %}{% endwith %}{{ z is defined }}");
    assert_eq!(body(both.0, "continue", both.1).as_deref(), Ok("1ABFalsec23ABFalsecd"));
    let inner = "{% for i in [1, 2] %}{% filter upper %}{% for j in 'ab' %}{% if j == 'b' %}{% break %}{% endif %}\
                 {{ j }}{{ loop.index }}{% endfor %}{{ loop.index }}z{% endfilter %}{% endfor %}";
    assert_eq!(render(inner).as_deref(), Ok("A11ZA12Z"));
}

/// The texts are transformers'.
#[test]
fn arguments_of_tojson_are_in_the_order_of_transformers() {
    for (source, text) in [
        ("{{ {'é': 1}|tojson(true) }}", "{\"\\u00e9\": 1}"),
        ("{{ {'a': 1}|tojson(4) }}", "{\"a\": 1}"),
        ("{{ {'é': [1]}|tojson(false, 2) }}", "{\n  \"é\": [\n    1\n  ]\n}"),
        ("{{ {'b': [1, 2], 'a': 3}|tojson(false, none, [',', ':'], true) }}", "{\"a\":3,\"b\":[1,2]}"),
        ("{{ {'b': [1, 2]}|tojson(none, separators=(',', ':')) }}", "{\"b\":[1,2]}"),
    ] {
        assert_eq!(render(source).as_deref(), Ok(text), "{source}");
    }
    for source in [
        "{{ [1]|tojson(true, ensure_ascii=true) }}",
        "{{ [1]|tojson(1, 2, none, false, 5) }}",
        "{{ [1]|tojson(separators=['a']) }}",
        "{{ [1]|tojson(separators=[1, 2]) }}",
    ] {
        assert!(render(source).is_err(), "{source}");
    }
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

/// Rows over budget cost no other row of a template that ends for short conversations.
#[test]
fn rows_over_budget_are_refused_alone() {
    let source = "{% if messages|length > 2 %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}\
                  {% endfor %}{% endif %}{{ messages|length }}";
    let template = Template::new("t.jinja", source, None).unwrap_or_else(|e| panic!("{e}"));
    let of = |n: usize| {
        let messages = vec![message("user", "a"); n];
        template.render(&messages, &Value::from(()), false, &Variables::default()).map(|o| o.0).ok()
    };
    assert_eq!([3, 3, 3, 3, 2].map(of), [None, None, None, None, Some("2".to_string())]);
}

/// As in Jinja2, which reads them before anything else.
#[test]
fn newlines_of_other_systems_are_newlines() {
    assert_eq!(render("a\r\nb{{ 'x\r\ny' }}\r{{ 1 }}\r\n").as_deref(), Ok("a\nbx\ny\n1"));
}

#[test]
fn macros_call_themselves_down_to_deep_values() {
    let source =
        "{% macro show(v) %}{% for x in v %}<{{ show(x) }}>{% endfor %}{% endmacro %}{{ show(deep) }}";
    let template = Template::new("t.jinja", source, None).unwrap_or_else(|e| panic!("{e}"));
    let render = |levels: usize| {
        let deep = (0..levels).fold(Value::from(Vec::<Value>::new()), |v, _| Value::from(vec![v]));
        let variables: Variables = std::sync::Arc::new([("deep".to_string(), deep)].into_iter().collect());
        template.render(&[], &Value::from(()), false, &variables).map(|o| o.0).map_err(|e| e.to_string())
    };
    for levels in [5, 60] {
        assert_eq!(render(levels), Ok("<".repeat(levels) + &">".repeat(levels)));
    }
    assert!(render(150).is_err_and(|e| e.contains("recursion limit")));
}

/// In Jinja2 they have another meaning than in the engine; the hints are as in Jinja2.
#[test]
fn values_that_name_variables_of_their_own_tag_are_refused() {
    for (source, why) in [
        ("{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m(1) }}", "set b = a if b is undefined else b"),
        (
            "{% macro m(a=b, b=1) %}{{ a }}{% endmacro %}{{ m() }}",
            "the parameter \"a\" names the parameter \"b\"",
        ),
        ("{% macro m() %}{{ caller(1) }}{% endmacro %}{% call(x, y=[x]) m() %}{{ y }}{% endcall %}", "\"x\""),
        ("{% with a = 2, b = a %}{{ b }}{% endwith %}", "reads \"a\", which the same tag sets"),
        ("{% with (a, b) = (1, 2), c = b %}{{ c }}{% endwith %}", "reads \"b\""),
    ] {
        let told = render(source);
        assert!(told.as_ref().is_err_and(|e| e.contains(why)), "{source}: {told:?}");
    }
    let outer = "{% set a = 1 %}{% with a = a + 1, b = 3 %}{{ a }}{{ b }}{% endwith %}{{ a }}";
    assert_eq!(render(outer).as_deref(), Ok("231"));
}

/// Each expression of the table has Jinja2's text, or raises an error as it does.
#[test]
fn templates_write_what_jinja2_writes() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/jinja/expressions.jsonl");
    let table = std::fs::read_to_string(path).unwrap();
    let mut lines = table.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    let context = crate::text::marks::jinja(&lines.next().unwrap());
    let variables: Variables = std::sync::Arc::new(
        context.as_object().unwrap().try_iter_pairs().unwrap().map(|(k, v)| (k.to_string(), v)).collect(),
    );
    let (mut wrong, mut count) = (Vec::new(), 0);
    for line in lines {
        let source = line[0].as_str().unwrap();
        let ours = Template::new("t.jinja", source, None).and_then(|t| {
            let messages: Vec<Value> = variables["messages"].try_iter().unwrap().collect();
            t.render(&messages, &Value::from(()), false, &variables).map(|o| o.0)
        });
        let same = match (&ours, line[1].as_str(), line[2].as_str()) {
            // a decided difference is an error, or equal
            (Ok(ours), theirs, Some(_)) => theirs.is_none() || theirs == Some(ours),
            (Err(_), _, Some(_)) => true,
            (Ok(ours), Some(theirs), None) => ours == theirs,
            (ours, theirs, None) => ours.is_err() && theirs.is_none(),
        };
        if !same {
            wrong.push(format!("{source}\n  Jinja2: {}\n  ft:     {ours:?}", line[1]));
        }
        count += 1;
    }
    assert!(count > 600 && wrong.is_empty(), "{} of {count} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// Run by `tests/peers/templates.sh`, with the texts of Jinja2 in the file `FT_TEMPLATES`.
#[test]
#[ignore = "needs templates of other packages"]
fn templates_of_packages_write_what_jinja2_writes() {
    let table = std::fs::read_to_string(std::env::var("FT_TEMPLATES").unwrap()).unwrap();
    let (mut wrong, mut count) = (Vec::new(), 0);
    for line in table.lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let value = |i: usize| crate::text::marks::jinja(&row[i]);
        let pairs = value(5)
            .as_object()
            .unwrap()
            .try_iter_pairs()
            .unwrap()
            .map(|(k, v)| (k.to_string(), v))
            .collect();
        let messages: Vec<Value> = value(2).try_iter().unwrap().collect();
        let ours = Template::new("t.jinja", row[1].as_str().unwrap(), None)
            .and_then(|t| t.render(&messages, &value(3), row[4] == true, &std::sync::Arc::new(pairs)));
        let ours = ours.map(|o| o.0).map_err(|e| e.to_string());
        count += 1;
        if ours.as_deref().ok() != row[6].as_str() {
            wrong.push(format!(
                "{}: Jinja2: {:.300} ft: {:.300}",
                row[0],
                row[6].to_string(),
                format!("{ours:?}")
            ));
        }
    }
    println!("{count} texts, {} differ", wrong.len());
    assert!(count > 0 && wrong.is_empty(), "{}", wrong.join("\n"));
}
