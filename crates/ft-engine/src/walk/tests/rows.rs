//! Training of single token rows.

use super::*;
use ft_recipe::Recipe;

const IDS: [u32; 5] = [77, 9, 3, 4, 111];

/// Gradients equal the matching rows of the table gradients, including both uses of a tied table; logits
/// reflect the new rows.
#[test]
fn rows_have_the_gradients_of_their_tables() -> Result<()> {
    let text = format!(
        "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"new_tokens\"]\ntokens = {IDS:?}\n[[data.train]]\n\
         source = \"d\"\nformat = \"text\"\n"
    );
    let rules = Recipe::parse(&text, "r.toml", &[])?.train;
    for c in &cases()? {
        let mut rows = Selection::from_rules(&c.config, &rules)?;
        rows.look_up(&c.config, None)?;
        let is_table = |m: &Module| matches!(m.group, Group::Embedding | Group::Head);
        let ends = in_full(Selection::frozen(&c.config), is_table);
        let batch = Rows::padded(c)?.batch(&c.config)?;
        let (d, p) = c.build(&rows, None)?;
        let (whole, all) = c.build(&ends, None)?;
        let ((loss, reached), (want, _)) = (backward(&d, &p, &batch, 1)?, backward(&whole, &all, &batch, 1)?);
        assert_eq!(loss, want, "{}", c.name());
        assert!(reached.iter().all(|r| *r) && reached.len() == if c.config.tied { 1 } else { 2 });
        let index = Tensor::new(IDS.as_slice(), CPU)?;
        for (i, t) in p.tensors.iter().enumerate() {
            let table = all.find(&format!("{}.weight", t.module)).context("a table")?;
            let grad = |p: &Params, i| p.grad(i)?.context("a gradient");
            let apart =
                distance(&values(&grad(&p, i)?), &values(&grad(&all, table)?.index_select(&index, 0)?));
            assert!(apart <= BAR, "{}, {}: {apart:.1e}", c.name(), t.name);
            // change the values in both
            let moved = (p.master(i)?.real()? * 1.5)?;
            p.set(i, &moved)?;
            let table_values = all.master(table)?.copy()?;
            for (row, id) in IDS.iter().enumerate() {
                table_values.slice_set(&moved.narrow(0, row, 1)?.into(), 0, *id as usize)?;
            }
            all.set(table, table_values.real()?)?;
        }
        let losses = |d: &Decoder| -> Result<f64> { Ok(loss::total(&Walk::new(d, None, 0).eval(&batch)?)?) };
        let (ours, want) = (losses(&d)?, losses(&whole)?);
        assert!((ours - want).abs() <= 1e-9 * want, "{}: {ours} and {want}", c.name());
        assert!((ours - loss * batch.target_count as f64).abs() > 1e-6 * want, "{}: the same loss", c.name());
    }
    Ok(())
}

/// Of a tied table, the padding token's row keeps the gradient as a head.
#[test]
fn the_padding_token_keeps_the_gradient_of_a_tied_head() -> Result<()> {
    let cases = cases()?;
    let tied = |c: &&Case| c.config.tied && c.config.layer_inputs.is_none();
    let c = cases.iter().find(tied).context("a case")?;
    let rows = Rows::padded(c)?;
    let pad = rows.micro.ids[0];
    let grads = |pad: Option<u32>| -> Result<Vec<f64>> {
        let (d, p) = c.build(&everything(&c.config), None)?;
        backward(&d, &p, &rows.batch(&Config { pad, ..c.config.clone() })?, 0)?;
        let table = p.tensors.iter().position(|t| t.module.contains("embed_tokens")).context("a table")?;
        gradient(&p, table)
    };
    let (before, after) = (grads(None)?, grads(Some(pad))?);
    let own = pad as usize * c.config.hidden..(pad as usize + 1) * c.config.hidden;
    assert!(before[own.clone()] != after[own.clone()] && after[own.clone()].iter().any(|g| *g != 0.0));
    assert_eq!((&before[..own.start], &before[own.end..]), (&after[..own.start], &after[own.end..]));
    Ok(())
}

/// PyTorch's `padding_idx`: the row of the padding token, and its column of LoRA's A, get nothing as inputs.
#[test]
fn the_padding_token_gives_its_row_no_gradient() -> Result<()> {
    let c = case("llama-embed-head")?;
    let (rows, vocab) = (Rows::padded(&c)?, c.config.vocab);
    let pad = rows.micro.ids[0];
    let (init, adapted) = c.adapter("adapter_init")?;
    for (selection, adapter) in [(everything(&c.config), None), (adapted, Some(&init))] {
        let grads = |pad: Option<u32>| -> Result<Vec<Vec<f64>>> {
            let (d, p) = c.build(&selection, adapter)?;
            backward(&d, &p, &rows.batch(&Config { pad, ..c.config.clone() })?, 0)?;
            gradients(&p)
        };
        let (_, p) = c.build(&selection, adapter)?;
        for (t, (before, after)) in p.tensors.iter().zip(grads(None)?.iter().zip(&grads(Some(pad))?)) {
            let width = t.shape.last().copied().unwrap_or(1);
            let is_table = t.module.contains("embed_tokens") && t.shape.contains(&vocab);
            let is_of_pad = |at: usize| {
                let place = if t.shape[0] == vocab { at / width } else { at % width };
                is_table && place == pad as usize
            };
            let reaches = (0..before.len()).any(|at| is_of_pad(at) && before[at] != 0.0);
            assert_eq!(reaches, is_table, "{}", t.name);
            let want: Vec<f64> =
                before.iter().enumerate().map(|(at, g)| if is_of_pad(at) { 0.0 } else { *g }).collect();
            assert_eq!(*after, want, "{}", t.name);
        }
    }
    Ok(())
}
