"""Devices, links and clusters, from the catalog, a file or text; how communication libraries use links.

`parts`: `Device`, `Level`, `Price`, `Group`.
`catalog`: the devices and cloud instances that ship with autoplan.
`nodes`: `Nodes`, the data of a cluster. `cluster`: `Cluster`, nodes with levels, parsing and what-ifs.
`cluster_file`: a cluster as a YAML file.
`fabric_graph`: links as a graph, and the levels that follow from it.
`fabric_routes`: shortest paths and load on links. `fabric_file`: a fabric in a cluster file.
`nccl`: protocols and algorithms of collectives per kind of link.
"""
