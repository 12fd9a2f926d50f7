//! Checks of lengths, batch sizes and ranks, and of `[log]`.

use super::context::Cross;
use crate::keys::Recipe;

/// Limits on tokens per micro-batch and on ranks. They keep byte counts in the plan within 64 bits.
const MICRO_TOKENS: u64 = 1 << 31;
const RANKS: u64 = 1 << 20;

impl Cross<'_, '_> {
    pub(super) fn lengths(&mut self, recipe: &Recipe) {
        let (batch, micro, ranks) =
            (recipe.run.batch_rows, recipe.run.micro_rows.count(), recipe.parallel.data);
        if self.all_good(&["run", "run.batch_rows", "run.micro_rows", "parallel", "parallel.data"]) {
            // The key ranges prevent overflow. `micro` is 1 if the plan chooses `micro_rows`.
            let unit = micro.saturating_mul(ranks).max(1);
            if batch % unit != 0 {
                let key = if self.given("run.micro_rows") {
                    "run.micro_rows"
                } else if self.given("run.batch_rows") {
                    "run.batch_rows"
                } else {
                    "parallel.data"
                };
                let below = batch / unit * unit;
                let near = if below == 0 {
                    format!("batch_rows = {unit}")
                } else {
                    format!("batch_rows = {below} or {}", below + unit)
                };
                let message = format!(
                    "batch_rows = {batch} does not divide by micro_rows x data ranks = {micro} x {ranks}"
                );
                self.report(key, message, format!("nearest: {near}"));
            }
        }
        let length = recipe.data.max_length;
        if micro.saturating_mul(length) as u64 > MICRO_TOKENS
            && self.all_good(&["run", "run.micro_rows", "data", "data.max_length"])
        {
            let message = format!(
                "a micro-batch of micro_rows x max_length = {micro} x {length} tokens is more than any machine holds"
            );
            self.report("run.micro_rows", message, "fewer rows, or a smaller data.max_length");
        }
        if recipe.parallel.ranks() > RANKS && self.all_good(&["parallel"]) {
            let message = format!("[parallel] asks for {} ranks", recipe.parallel.ranks());
            self.report("parallel", message, format!("their number is a product, of up to {RANKS}"));
        }
        self.mesh(recipe);
        let output = recipe.run.output.to_string_lossy().into_owned();
        if self.all_good(&["run", "run.output"]) && output.contains(['{', '}']) {
            self.report(
                "run.output",
                "run.output has braces that are not {name}".into(),
                "{name} is the only thing that is filled in",
            );
        }
    }

    /// Requires the ranks of a stage to be a multiple of `parallel.expert`.
    fn mesh(&mut self, recipe: &Recipe) {
        let (ranks, expert) = (recipe.parallel.stage(), recipe.parallel.expert as u64);
        let keys = ["parallel", "parallel.data", "parallel.context", "parallel.tensor", "parallel.expert"];
        if !self.all_good(&keys) || ranks.is_multiple_of(expert) {
            return;
        }
        let below = (1..=expert.min(ranks)).rev().find(|n| ranks.is_multiple_of(*n)).unwrap_or(1);
        let above = (expert..=ranks).find(|n| ranks.is_multiple_of(*n));
        let near = above.map_or(below.to_string(), |above| format!("{below} or {above}"));
        let hint = match ranks {
            1 => format!("parallel.data = {expert}: experts are spread over the ranks, and add none"),
            _ => format!("nearest: expert = {near}"),
        };
        let message =
            format!("data x context x tensor = {ranks} ranks do not divide into blocks of expert = {expert}");
        self.report("parallel.expert", message, hint);
    }

    /// Checks `[log]`.
    pub(super) fn log(&mut self, recipe: &Recipe) {
        let Some(url) = &recipe.log.mlflow else { return };
        let address = ["http://", "https://"].iter().find_map(|scheme| url.strip_prefix(scheme));
        let host = address.and_then(|a| a.split('/').next()).unwrap_or_default();
        if host.is_empty() {
            let message = format!("log.mlflow = {url:?} is no address of a server");
            self.report("log.mlflow", message, "log.mlflow = \"http://localhost:5000\"");
        } else if host.contains('@') || (url.contains('@') && !has_port(host)) {
            let message = "log.mlflow holds a user or a password".to_string();
            let hint = "recipes are kept and shown: MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD";
            self.report("log.mlflow", message, hint);
        } else if !host.is_ascii() {
            let message = format!("log.mlflow = {url:?} has a host name with other than ASCII letters");
            self.report("log.mlflow", message, "its Punycode (xn--..)");
        }
    }
}

/// Whether the text behind a host's last colon, if any, is a port; else the host is a user.
fn has_port(host: &str) -> bool {
    let is_port = |port: &str| port.ends_with(']') || port.bytes().all(|b| b.is_ascii_digit());
    host.rsplit_once(':').is_none_or(|(_, port)| is_port(port))
}
