"""Texts that run a script if a page shows them without escaping them, and texts that hide or flood."""

SCRIPT = "document.title='run'"

IN_HTML = (
    f"<script>{SCRIPT}</script>",
    f"<ScRiPt >{SCRIPT}</sCrIpT>",
    f"</pre><script>{SCRIPT}</script>",
    f"</span></div><script>{SCRIPT}</script>",
    f"</script><script>{SCRIPT}</script>",
    f"</style><script>{SCRIPT}</script>",
    f"</title><script>{SCRIPT}</script>",
    f"</textarea><script>{SCRIPT}</script>",
    f"--><script>{SCRIPT}</script><!--",
    f"]]><script>{SCRIPT}</script>",
    f"<img src=x onerror={SCRIPT}>",
    f'<img src="x" onerror="{SCRIPT}">',
    f"<img/src=x/onerror={SCRIPT}>",
    f"<svg onload={SCRIPT}>",
    f"<svg><script>{SCRIPT}</script></svg>",
    f"<svg><animate onbegin={SCRIPT} attributeName=x dur=1s></svg>",
    f"<math><mtext></mtext><mglyph><style><img src=x onerror={SCRIPT}></style></mglyph></math>",
    f"<body onload={SCRIPT}>",
    f"<iframe srcdoc='<script>parent.{SCRIPT}</script>'></iframe>",
    f"<iframe src=javascript:parent.{SCRIPT}></iframe>",
    f"<object data=javascript:{SCRIPT}></object>",
    f"<embed src=javascript:{SCRIPT}>",
    f"<a href=javascript:{SCRIPT}>open</a>",
    f"<a href='java\tscript:{SCRIPT}'>open</a>",
    f"<form action=javascript:{SCRIPT}><button>send</button></form>",
    f"<input autofocus onfocus={SCRIPT}>",
    f"<select autofocus onfocus={SCRIPT}></select>",
    f"<details open ontoggle={SCRIPT}>x</details>",
    f"<video><source onerror={SCRIPT}></video>",
    f"<audio src=x onerror={SCRIPT}></audio>",
    f"<marquee onstart={SCRIPT}>x</marquee>",
    f"<meta http-equiv=refresh content='0;url=javascript:{SCRIPT}'>",
    "<link rel=stylesheet href=//example.invalid/x.css>",
    "<base href=//example.invalid/>",
    "<style>body{display:none}</style>",
    "<style>@import '//example.invalid/x.css';</style>",
    f"<template><script>{SCRIPT}</script></template>",
    f"<noscript><p title='</noscript><img src=x onerror={SCRIPT}>'>",
    f"<p style=background:url(//example.invalid/x) onclick={SCRIPT}>x</p>",
)

IN_ATTRIBUTES = (
    f'" onmouseover="{SCRIPT}',
    f"' onmouseover='{SCRIPT}",
    f'" autofocus onfocus="{SCRIPT}" x="',
    f"' autofocus onfocus='{SCRIPT}' x='",
    f'"><script>{SCRIPT}</script>',
    f"'><script>{SCRIPT}</script>",
    f"`><script>{SCRIPT}</script>",
    f"&quot;><img src=x onerror={SCRIPT}>",
    f"&#34; onclick=&#34;{SCRIPT}",
    f"\\u0022><script>{SCRIPT}</script>",
    f"]']<script>{SCRIPT}</script>",
    f"javascript:{SCRIPT}",
    f"data:text/html,<script>{SCRIPT}</script>",
)

IN_TEMPLATES = (
    "{{ 7 * 7 }}",
    "{% for x in range(9) %}x{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "${7*7}",
)

HIDDEN = (
    "\x1b]0;title\x07\x1b[31mred\x1b[2J",
    "a\x00b\x08\x7fc",
    "user\u202etxt.exe\u2066\u2069\u200b\ufeff",
    "\ud800 alone \udfff",
)

HOSTILE = (*IN_HTML, *IN_ATTRIBUTES, *IN_TEMPLATES, *HIDDEN)
