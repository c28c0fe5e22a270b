"""Chat templates that fail, that take forever, and that reach for what they must not see."""

_GROW = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x == ns.x }}"
)

FAILING = {
    "division": "{{ messages }}\n{{ 1/0 }}",
    "overflow": "{{ 10.0**400 }}",
    "recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for x in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "unknown filter": "{{ 'a' | fly }}",
    "unknown test": "{{ 'a' is flying }}",
    "unknown name": "{{ a.b.c }}",
    "other types": "{{ 1 + 'a' }}",
    "not a function": "{{ messages() }}",
    "wrong unpacking": "{% for a, b in [1] %}{% endfor %}",
    "raised": "{{ raise_exception('no\n' * 1000) }}",
    "other file": "{% include '/etc/passwd' %}",
    "other template": "{% extends 'x' %}",
    "class": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ messages.__class__.__base__.__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "frame of a generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "attribute of a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "changes its messages": "{{ messages.pop() }}",
    "syntax": "\n{% for %}",
    "not closed": "{{ 'a'",
    "deep parentheses": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "deep blocks": "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "long sum": "{{ " + "1+" * 20_000 + "1 }}",
}
"""Templates that raise an error; the renderer raises UnsupportedChat."""

EXPENSIVE = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "nested loops over one range": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "loops with a condition": "{% for i in range(99999) if i < 0 %}{% endfor %}" * 5,
    "loops in a loop": "{% set r = range(9999) %}{% for x in r recursive %}{% if loop.depth0 < 3 %}{{ loop(r) }}"
    "{% endif %}{% endfor %}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "long body": "{% for i in range(99999) %}" + "{% set x = 1 %}" * 2000 + "{% endfor %}",
    "repeated text": "{{ 'a' * 10**10 }}",
    "repeated list": "{{ ([1] * 10**9) | length }}",
    "power": "{{ 9**(9**9) }}",
    "squares": _GROW % ("3", "ns.x * ns.x"),
    "doubled by ~": _GROW % ("'aaaa'", "ns.x ~ ns.x"),
    "doubled by +": _GROW % ("'aaaa'", "ns.x + ns.x"),
    "doubled by %": _GROW % ("'aaaa'", "'%s%s' % (ns.x, ns.x)"),
    "doubled by format": _GROW % ("'aaaa'", "'{0}{0}'.format(ns.x)"),
    "doubled by a block": "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% set ns.x = y %}{% endfor %}",
    "tree of lists": _GROW % ("[]", "[ns.x, ns.x]"),
    "tree of tuples": _GROW % ("()", "(ns.x, ns.x)"),
    "tree of repeated lists": _GROW % ("[]", "[ns.x] * 2"),
    "tree of dictionaries": _GROW % ("{}", "{'a': ns.x, 'b': ns.x}"),
    "tree by dict()": _GROW % ("{}", "dict(a=ns.x, b=ns.x)"),
    "tree by batches": _GROW % ("[1]", "[1] | batch(1000, ns.x) | list"),
    "center": "{{ 'a'.center(10**9) }}",
    "centered by a filter": "{{ 'a' | center(1000000000) }}",
    "zeros": "{{ 'a'.zfill(1000000000) }}",
    "indent": "{{ ('\\n' * 1000000) | indent(1000000) }}",
    "indented JSON": "{{ messages | tojson(indent=1000000000) }}",
    "replaced letters": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) | length }}",
    "joined letters": "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "joined list": "{{ (['a' * 100000] * 1000) | join }}",
    "written list": "{{ ['a' * 1000000] * 10000 }}",
    "long text in a loop": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "slices": "{{ [1] | slice(1000000000) | list | length }}",
    "sorted often": "{% for i in range(1000) %}{% set x = range(99999) | sort %}{% endfor %}",
    "searched often": "{% set s = 'a' * 4999999 %}{% for i in range(99999) %}{% set x = 'b' in s %}{% endfor %}",
    "split often": "{% set s = 'a ' * 999999 %}{% for i in range(99999) %}{% set x = s.split() %}{% endfor %}",
    "long list": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + [i] %}{% endfor %}",
    "long template": "x" * 10**6,
}
"""Templates that need too many steps, characters or digits; the renderer raises InvalidInput."""

REFUSED_FORMATS = {
    "width": "{{ '%1000000000d' % 1 }}",
    "width of an argument": "{{ '%*d' % (1000000000, 1) }}",
    "width in braces": "{{ '{:1000000000d}'.format(1) }}",
    "width of an argument in braces": "{{ '{:{}}'.format(1, 1000000000) }}",
    "width for a filter": "{{ '%1000000000d' | format(1) }}",
    "width of a date": "{{ strftime_now('%1000000000d') }}",
    "large range": "{{ range(10**9) | list }}",
    "translation": "{{ 'a'.translate({97: 'b'}) }}",
}
"""Templates that raise an error because of a function that could produce too much."""
