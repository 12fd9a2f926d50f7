//! Values of templates with the semantics of Python, as Jinja2 shows them: text, operators, methods.
//!
//! The template engine has own rules for text, comparisons and arithmetic; models were trained on Python's. A function
//! pays for its work beforehand, in the bytes of [`super::bounds`]. Errors are Python's, and an exhausted budget.
//!
//! | file | contents |
//! |---|---|
//! | `kind` | types of values; generators, views, ranges, groups, bound methods |
//! | `text` | `str()` and `repr()` |
//! | `compare` | equality, order, containment |
//! | `number` | arithmetic |
//! | `access` | attributes, items, slices, iteration |
//! | `methods` | methods of lists, tuples, dicts and numbers; calls of all methods |
//! | `strings` | methods of strings |
//! | `percent`, `format`, `digits` | `%`, `str.format`, numbers in both |

pub(super) mod access;
pub(super) mod compare;
mod digits;
mod format;
pub(super) mod kind;
pub(super) mod methods;
pub(super) mod number;
pub(super) mod percent;
pub(super) mod strings;
pub(super) mod text;
