//! optimizer.cu compiled for the host, compared with the CPU implementation; see
//! `kernel::cuda::host_tests`.

use super::*;
use crate::Tensor;
use crate::check::{randn, values};
use crate::cuda::host_tests::{Argument, Served, Watched, bytes, tensor};
use candle_core::{DType, Device, Result};

#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn rounding_by_random_numbers_on_the_host_gives_the_same_bits() -> Result<()> {
    let mut host = Served::new("crates/ft-kernels/src/optimizer/optimizer.cu", Watched::Bounds);
    for (n, first) in [(3000, 256), (1, 1 << 20), (777, 3)] {
        for scale in [1.0, 1e-5] {
            let x = (&randn(n as u64, n, DType::F32)? * scale)?;
            let values_of_x = bytes(&x)?;
            for (dtype, name) in [(DType::BF16, "optimizer_round_bf16"), (DType::F16, "optimizer_round_f16")]
            {
                let draws = Draws::new(9, 4, 2, first);
                let mut all = vec![Argument::In(&values_of_x, 0), Argument::Out(2 * n), (n as u64).into()];
                all.push(draws.first.into());
                all.extend(draws.stream.words().map(Argument::from));
                let got = host.launch(name, [n.div_ceil(1024), 1, 1], 0, &all);
                let want = Tensor::zeros(n, dtype, &Device::Cpu)?;
                round(&x, &want, draws)?;
                assert_eq!(values(&tensor(&got, n, dtype)?), values(&want), "{n} {dtype:?} {scale}");
            }
        }
    }
    host.finish();
    Ok(())
}
