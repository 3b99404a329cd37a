//! Which GPUs the stages of a plan get: largest stages first, each on the first node with room, which is exact for powers of two.

use super::Mesh;

/// The GPUs of each stage, numbered node by node; nothing where they do not fit.
///
/// Stages of one degree go in order, and the nodes are numbered by the first stage that they have, so neighbours in the pipeline are neighbours on the machine where that is possible.
pub(super) fn place(mesh: Mesh, degrees: &[u32]) -> Option<Vec<Vec<usize>>> {
    let mut order: Vec<usize> = (0..degrees.len()).collect();
    order.sort_by_key(|stage| std::cmp::Reverse(degrees[*stage]));
    let mut nodes: Vec<(usize, Vec<usize>)> = vec![(mesh.gpus_per_node(), Vec::new()); mesh.nodes()];
    for stage in order {
        let needed = degrees[stage] as usize;
        let (room, stages) = nodes.iter_mut().find(|(room, _)| *room >= needed)?;
        *room -= needed;
        stages.push(stage);
    }
    nodes.iter_mut().for_each(|(_, stages)| stages.sort_unstable());
    nodes.sort_by_key(|(_, stages)| stages.first().copied().unwrap_or(usize::MAX));
    let mut gpus = vec![Vec::new(); degrees.len()];
    for (node, (_, stages)) in nodes.into_iter().enumerate() {
        let mut next = node * mesh.gpus_per_node();
        for stage in stages {
            gpus[stage] = (next..next + degrees[stage] as usize).collect();
            next += degrees[stage] as usize;
        }
    }
    Some(gpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_in_order_get_gpus_in_order_where_they_can() {
        let mesh = |nodes, gpus| Mesh::new(nodes, gpus).unwrap();
        assert_eq!(place(mesh(2, 4), &[2, 2, 4]).unwrap(), [vec![0, 1], vec![2, 3], vec![4, 5, 6, 7]]);
        // In order 2 and 2 would leave 4 without a place.
        assert_eq!(
            place(mesh(2, 6), &[2, 2, 4, 4]).unwrap(),
            [vec![0, 1], vec![6, 7], vec![2, 3, 4, 5], vec![8, 9, 10, 11]]
        );
        assert_eq!(place(mesh(2, 3), &[2, 1, 2, 1]).unwrap(), [vec![0, 1], vec![2], vec![3, 4], vec![5]]);
        assert_eq!(place(mesh(2, 3), &[2, 2, 2]), None);
    }
}
