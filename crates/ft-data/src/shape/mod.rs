//! Converts rows to conversations, texts or token ids.
//!
//! | file | contents |
//! |---|---|
//! | `schema` | format, field names and mask of a source |
//! | `sample` | row -> sample |
//! | `messages`, `turns` | messages, or prompt and completion of a row -> conversation |
//! | `preference` | row -> pair, or rated completion |
//! | `keys` | unread keys of a row: refused or noted |
//! | `notes` | notes on usable rows, counted by kind |
//! | `alpaca` | prompt format of the Alpaca models |
//! | `example` | a tokenized sample |
//! | `teacher` | a teacher's values in a row |
//! | `values` | values in error messages; noncharacters |

pub(crate) mod alpaca;
pub(crate) mod example;
pub(crate) mod keys;
pub(crate) mod messages;
pub(crate) mod notes;
pub(crate) mod preference;
pub(crate) mod sample;
pub(crate) mod schema;
pub(crate) mod teacher;
mod turns;
pub(crate) mod values;
