//! Error of products of 8-bit floats against bf16, on a model as it trains.

use crate::train::logits_apart;
use crate::train::step::{StepOutput, TrainedModel};
use candle_core::{DType, Device};
use ft_base::rng::{Purpose, Stream};
use ft_engine::model::linear::Weight;
use ft_kernels::Tensor;
use ft_kernels::fp8::{self, Fp8Matrix};
use ft_kernels::tensor::Real;
use serde_json::{Value, json};

/// Rows of the compared product.
const ROWS: usize = 256;

/// Relative errors against bf16.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Error {
    /// L2 distance of `x W^T` and of `dy W` for normal x and dy, and the first such weight of the model; `None` for
    /// weights off the device between visits.
    products: Option<[f64; 2]>,
    /// Difference of the loss and of the gradient norm of a step.
    loss: f64,
    grad_norm: f64,
    /// Whether rows have scales of their own.
    by_row: bool,
}

impl Fp8Error {
    /// Compares products of the model, and a step in 8-bit floats with one in bf16; `None` without 8-bit weights.
    pub fn measure(
        model: &TrainedModel,
        device: &Device,
        step: impl Fn() -> ft_base::Result<StepOutput>,
    ) -> ft_base::Result<Option<Self>> {
        let linears = model.decoder.linears();
        let weights = linears.iter().map(|(_, l)| &l.weight);
        let Some(w) = weights.filter_map(|w| if let Weight::Fp8(w) = w { Some(w) } else { None }).next()
        else {
            return Ok(None);
        };
        let products = match model.params.is_gathered() {
            true => None,
            false => Some([product(w, device, false)?, product(w, device, true)?]),
        };
        let (ours, theirs) = (step()?, fp8::exactly(step)?);
        let apart = |a: f64, b: f64| (a - b).abs() / b.abs().max(f64::MIN_POSITIVE);
        Ok(Some(Self {
            products,
            loss: apart(ours.loss, theirs.loss),
            grad_norm: apart(ours.grad_norm, theirs.grad_norm),
            by_row: fp8::scales_by_row(device)?,
        }))
    }

    pub fn json(&self) -> Value {
        let [forward, backward] = self.products.map_or([None; 2], |p| p.map(Some));
        json!({"forward": forward, "backward": backward, "loss": self.loss, "grad_norm": self.grad_norm,
               "scales": if self.by_row { "row" } else { "tensor" }})
    }

    pub fn text(&self) -> String {
        let scales = if self.by_row { "a scale a row" } else { "a scale a tensor" };
        let products = self.products.map_or(String::new(), |p| {
            let [forward, backward] = p.map(|e| 100.0 * e);
            format!("{forward:.1}% forward and {backward:.1}% backward (L2 of one product), ")
        });
        format!(
            "products in fp8 ({scales}), apart from bf16: {products}{:.3}% of the loss and {:.1}% of the gradient \
             norm of a step\n",
            100.0 * self.loss,
            100.0 * self.grad_norm
        )
    }
}

/// Relative L2 distance of a product with normal rows from the product in bf16.
fn product(w: &Fp8Matrix, device: &Device, back: bool) -> candle_core::Result<f64> {
    let (o, i) = w.dims();
    let (cols, s) = (if back { o } else { i }, Stream::new(0, Purpose::Sample, 0, 0));
    let values: Vec<f32> = (0..(ROWS * cols) as u64).map(|n| s.normal(n)).collect();
    let x = Real::from_vec(values, (ROWS, cols), &Device::Cpu)?;
    let x = Tensor::Real(x.to_dtype(DType::BF16)?.to_device(device)?);
    let of = || if back { w.backward(&x, None) } else { w.forward(&x) };
    let (ours, theirs) = (of()?, fp8::exactly(of)?);
    logits_apart(ours.real()?, theirs.real()?)
}
